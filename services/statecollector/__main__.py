"""`python -m services.statecollector`: settings, then the service until a signal."""

from __future__ import annotations

import sys

from dualmap.runtime.lifetime import run_service
from dualmap.runtime.logs import setup_logs
from dualmap.runtime.settings_loader import load_settings
from services.statecollector.app import serve
from services.statecollector.settings import Settings


def main() -> int:
    """Run the service; gives the process's exit code."""
    settings = load_settings(Settings)
    setup_logs(settings.log, "statecollector")
    return run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    sys.exit(main())
