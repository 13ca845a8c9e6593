"""Which calls are traced: those of a request or a round, not the polls and renewals that go on without end."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from opentelemetry.instrumentation.grpc import filters

UNTRACED_METHODS = ("GetState", "PollState", "Renew", "ReportHeat")
"""Made many times a second for no request; their metrics say what a span of each would."""

SPANLESS_CALLS = ("Accept",)
"""A relay leaves this stream at its last event, which the instrumentation takes for a call that never ends: its span
would never be sent. The caller's own span is the hand-over, whose context goes along in the metadata."""


def _none_of(*methods: str) -> Callable[[grpc.HandlerCallDetails], bool]:
    return filters.negate(filters.any_of(filters.health_check(), *(filters.method_name(name) for name in methods)))


traced = _none_of(*UNTRACED_METHODS)
"""At servers."""

traced_at_caller = _none_of(*UNTRACED_METHODS, *SPANLESS_CALLS)
"""At clients."""
