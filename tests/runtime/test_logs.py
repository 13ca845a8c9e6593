"""Promises of the logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import stamina
import stamina.instrumentation
import structlog

from dualmap.runtime.logs import get_log, setup_logs
from dualmap.runtime.settings import LogSettings


@pytest.fixture
def restored() -> Iterator[None]:
    """Logging is the process's: put it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    stamina.instrumentation.set_on_retry_hooks(None)


@pytest.mark.usefixtures("restored")
def test_a_line_is_json_with_event_and_fields() -> None:
    """Also from a log that was made before the set-up, and below the level nothing."""
    log = get_log("ring")
    out = io.StringIO()
    setup_logs(LogSettings(), "ringmanager", out)

    log.info("epoch_changed", ring_epoch=7)
    log.debug("hidden")

    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "epoch_changed",
        "ring_epoch": 7,
        "part": "ring",
        "level": "info",
        "service": "ringmanager",
    }


@pytest.mark.usefixtures("restored")
def test_a_library_writes_the_same_form() -> None:
    """One stream, one form; its INFO is left out."""
    out = io.StringIO()
    setup_logs(LogSettings(), "router", out)

    logging.getLogger("aiohttp.access").info("GET /")
    logging.getLogger("grpc").warning("odd %s", "thing")

    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["part"], entry["level"]) == ("odd thing", "grpc", "warning")


@pytest.mark.usefixtures("restored")
def test_retries_are_logged_by_those_who_retry() -> None:
    """The library would warn at each, with the call's arguments."""
    out = io.StringIO()
    setup_logs(LogSettings(), "router", out)

    for attempt in stamina.retry_context(on=ValueError, attempts=2, wait_initial=0.0, wait_jitter=0.0):
        with attempt:
            if attempt.num == 1:
                raise ValueError("once")

    assert not out.getvalue()


@pytest.mark.usefixtures("restored")
def test_an_exception_stays_on_its_line() -> None:
    """One event, one line, whatever happened."""
    out = io.StringIO()
    setup_logs(LogSettings(), "router", out)

    try:
        raise ValueError("broken")
    except ValueError as error:
        get_log("x").error("failed", exc_info=error)

    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "broken"


@pytest.mark.usefixtures("restored")
def test_exceptions_in_logs_show_no_local_variables() -> None:
    """A frame's locals may hold a prompt."""
    out = io.StringIO()
    setup_logs(LogSettings(), "router", out)
    prompt = "my secret prompt"

    try:
        raise ValueError(str(len(prompt)))
    except ValueError as error:
        get_log("x").error("failed", exc_info=error)

    assert "secret" not in out.getvalue()


@pytest.mark.usefixtures("restored")
def test_console_form_is_for_people() -> None:
    """No JSON there."""
    out = io.StringIO()
    setup_logs(LogSettings(format="console"), "router", out)

    get_log("x").warning("seen", count=1)

    assert "seen" in out.getvalue()
    assert not out.getvalue().startswith("{")
