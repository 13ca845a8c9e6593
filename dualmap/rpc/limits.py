"""Bounds of what a client may say, one for Route and Submit: what a router takes, the agent it names takes too."""

from __future__ import annotations

MAX_ID_CHARACTERS = 128
MAX_ATTEMPT = 65_535
"""At an agent; a router takes one less, as the retry at the backup is one more."""

MAX_SLO_MS = 3_600_000
MAX_AGE_MS = 86_400_000
"""A day since a caller first asked."""
