"""The check of `make compose-test` sees what is wrong with a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compose.traces import check_traces

Spans = list[dict[str, Any]]


def span(name: str, span_id: str, parent: str = "", **more: Any) -> dict[str, Any]:
    return {"trace_id": "t", "name": name, "span_id": span_id, "parent_span_id": parent, "links": []} | more


def at(instance: str) -> dict[str, Any]:
    return {"attributes": {"dualmap.instance": instance}}


@pytest.fixture
def moved() -> Spans:
    """A request that was handed over, as it should be."""
    return [
        span("dualmap.request", "root"),
        span("dualmap.v1.Router/Route", "route", "root"),
        span("/dualmap.v1.InstanceAgent/Submit", "submit", "route"),
        span("queue wait", "w1", "submit", **at("a/0")),
        span("hand over", "h", "submit", links=[{"span_id": "round"}], **at("a/0")),
        span("queue wait", "w2", "h", **at("b/0")),
        span("prefill", "p", "h", **at("b/0")),
        span("decode", "d", "h", **at("b/0")),
        span("rebalance.round", "round") | {"trace_id": "other"},
    ]


def problems(spans: Spans) -> str:
    return "\n".join(check_traces(map(json.dumps, spans)).problems)


def test_a_whole_trace_has_no_problem(moved: Spans) -> None:
    """One root, Route and Submit under it, two agents, the round linked; other traces are not counted."""
    facts = check_traces(map(json.dumps, moved))

    assert (facts.requests, facts.migrated, facts.problems) == (1, 1, ())


@pytest.mark.parametrize("missing", range(1, 9))
def test_each_span_is_missed(moved: Spans, missing: int) -> None:
    """Whichever is left out of what has to be there, the check says so."""
    name = moved[missing]["name"]
    left = [other for other in moved if other["name"] != name]

    assert problems(left)


def test_a_second_root_is_a_problem(moved: Spans) -> None:
    """A Submit that lost its context begins a trace of its own, or hangs beside the request."""
    moved[2]["parent_span_id"] = ""

    assert "roots" in problems(moved)


def test_both_states_on_one_agent_are_a_problem(moved: Spans) -> None:
    """A hand-over that shows one agent shows half of the way."""
    for state in moved[5:8]:
        state.update(at("a/0"))

    assert "on one agent only" in problems(moved)


def test_a_move_without_its_round_is_a_problem(moved: Spans) -> None:
    """Who moved it must be found from the trace."""
    moved[4]["links"] = []

    assert "not linked" in problems(moved)
