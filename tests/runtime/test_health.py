"""Promises of the named components."""

from __future__ import annotations

import pytest

from dualmap.runtime.health import Health


@pytest.mark.parametrize(
    ("redis", "view", "stopping", "ready"),
    [
        (None, None, False, False),
        (True, None, False, False),
        (True, True, False, True),
        (True, False, False, False),
        (True, True, True, False),
    ],
)
def test_ready_is_every_gating_component_ok_and_no_stop(
    redis: bool | None, view: bool | None, stopping: bool, ready: bool
) -> None:
    """None: the component has not spoken yet."""
    health = Health()
    for name, well in (("redis", redis), ("view", view)):
        component = health.component(name)
        if well is not None:
            component.ok() if well else component.fail("gone")
    if stopping:
        health.stop()

    assert health.ready is ready


def test_a_component_that_does_not_gate_may_fail() -> None:
    """Redis gone is red, but never an error for a caller."""
    health = Health()
    health.component("view").ok()
    health.component("redis", gates=False).fail("no answer")

    assert health.ready
    assert health.summary() == {"": True, "liveness": True, "redis": False, "view": True}


def test_liveness_is_apart_from_readiness() -> None:
    """Draining is no reason to be killed; a vital part failing is."""
    health = Health()
    loop = health.component("loop", vital=True, gates=False)
    health.component("redis").fail("no answer")
    health.stop()

    assert health.alive

    loop.fail("hangs")

    assert not health.alive


def test_watchers_hear_changes_only() -> None:
    """Saying the same again is no change."""
    health = Health()
    redis = health.component("redis")
    heard: list[bool] = []
    health.watch(lambda: heard.append(health.ready))

    redis.ok()
    redis.ok()
    redis.fail("no answer")

    assert heard == [True, False]


def test_a_name_is_used_once() -> None:
    """Two parts under one name would hide each other."""
    health = Health()
    health.component("redis")

    with pytest.raises(ValueError, match="redis"):
        health.component("redis")
