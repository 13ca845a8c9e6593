"""Which calls are traced: those of a request or a round, not the polls and renewals that go on without end."""

from __future__ import annotations

from opentelemetry.instrumentation.grpc import filters

UNTRACED_METHODS = ("GetState", "Renew", "ReportHeat")
"""Made many times a second for no request; their metrics say what a span of each would."""

traced = filters.negate(
    filters.any_of(filters.health_check(), *(filters.method_name(name) for name in UNTRACED_METHODS))
)
