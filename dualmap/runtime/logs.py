"""Logs as events with fields, to stderr; the libraries' own go the same way. Never prompts, tokens or credentials."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import stamina.instrumentation
import structlog
from structlog.typing import FilteringBoundLogger, Processor

from dualmap.runtime.settings import LogSettings

Log = FilteringBoundLogger

# A frame's local variables may hold a prompt: never shown.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)


def setup_logs(settings: LogSettings, service: str, stream: TextIO | None = None) -> None:
    """Send every log line of this process to ``stream`` (stderr), each with the service's name."""

    def name_service(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        name_service,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: Processor = structlog.processors.JSONRenderer()
    if settings.format == "console":
        render = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        shared.append(structlog.processors.ExceptionRenderer(_TRACEBACKS))
    out = stream or sys.stderr
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[_name_library, structlog.stdlib.ProcessorFormatter.remove_processors_meta, *shared, render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # A library's INFO is about itself; ours is about the cluster.
    root.setLevel(max(level, logging.WARNING))
    # It would warn at each try with the call's arguments; who retries logs it.
    stamina.instrumentation.set_on_retry_hooks(())


def get_log(part: str) -> Log:
    """The log of one part of the process; takes effect with `setup_logs`, whichever comes first."""
    log: Log = structlog.get_logger(part=part)
    return log


def _name_library(_logger: object, _method: str, event: Any) -> Any:
    record: logging.LogRecord = event["_record"]
    event["part"] = record.name
    return event
