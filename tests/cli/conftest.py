"""Commands as their users run them, and a width at which nothing wraps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from dualmap.cli import explain, ring, route, top

Result = tuple[int, str, str]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line; gives exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("ROUTERS", "COLLECTORS", "RING_MANAGERS", "REBALANCERS", "POOL__NAME", "JAEGER_URL"):
        monkeypatch.delenv(f"DUALMAP_{name}", raising=False)
    app = typer.Typer()
    app.command("route")(route.route)
    app.command("explain")(explain.explain)
    app.command("top")(top.top)
    app.add_typer(ring.app, name="ring")

    def one(*words: str) -> Result:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return one


@pytest.fixture
def ids() -> str:
    """Token ids of ten full blocks and a tail."""
    return ",".join(str(number) for number in range(1_300))
