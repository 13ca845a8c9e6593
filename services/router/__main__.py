"""`python -m services.router [--workers N]`: settings, then one router, or several on one port, until a signal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from dualmap.runtime.lifetime import run_service, start_error_code
from dualmap.runtime.logs import setup_logs
from dualmap.runtime.settings_loader import load_settings
from services.router.app import Announce, serve
from services.router.settings import Settings
from services.router.workers import run_workers

_FLAGS = {"--workers": "DUALMAP_ROUTER__WORKERS"}


def main() -> int:
    """Run the service; gives the process's exit code."""
    settings = load_settings(Settings, flags=_FLAGS)
    setup_logs(settings.log, "router")
    if settings.router.workers == 1:
        return run_service(lambda stop: serve(settings, stop, _print_line))
    return start_error_code(lambda: run_workers(settings, _serve_worker))


def _serve_worker(settings: Settings, announce: Announce) -> int:
    return run_service(lambda stop: serve(settings, stop, announce, shared_port=True))


def _print_line(line: Mapping[str, Any]) -> None:
    """One JSON line on stdout: parents find the ports by it."""
    print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
