"""The `dualmap` command: one file a subcommand. An error a user can act on is one line on stderr and exit code 1."""

from __future__ import annotations

import sys

import typer

from dualmap.cli import bench, chaos, demo, engine, explain, replay, ring, route, simulate, top, up
from dualmap.cli.processes import StartError
from dualmap.core.errors import DualMapError
from dualmap.runtime.logs import setup_logs
from dualmap.runtime.settings import LogSettings
from dualmap.simulator.trace import TraceError

app = typer.Typer(
    name="dualmap",
    help="Cache-aware, load-aware routing for clusters of LLM engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("replay")(replay.replay)
app.command("chaos")(chaos.chaos)
app.command("route")(route.route)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.command("engine")(engine.engine)
app.add_typer(ring.app, name="ring")
app.add_typer(bench.app, name="bench")
app.add_typer(simulate.app, name="simulate")


def main() -> None:
    """Run the command."""
    # What a command has to say it prints; a log line is a fault worth a look.
    setup_logs(LogSettings(level="warning", format="console"), "dualmap")
    try:
        app()
    except (StartError, TraceError, DualMapError, TimeoutError) as error:
        sys.stderr.write(f"dualmap: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
