"""What a view counts about itself: every fallback has a name, so that none is silent."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class ViewEvent(StrEnum):
    """Something that happened to a view; the values are metric labels."""

    STORE_LOST = "store_lost"
    """The store stopped answering: the view goes on as it is, degraded."""
    STORE_BACK = "store_back"
    """The store answers again: the view goes on from where it was, or, where that is gone, was loaded anew."""
    EPOCH_BACKWARD = "epoch_backward"
    """The stored ring is older than the one held, or gone: the store lost data. The held one stays."""
    GAP = "gap"
    """A step was missing: the instance is loaded whole."""
    DIGEST = "digest"
    """The index differs from the agent's at the same version: the instance is loaded whole."""
    UNREADABLE = "unreadable"
    """A stored value could not be read: passed over, and the instance is loaded whole."""
    MASS_UNREACHABLE = "mass_unreachable"
    """More than half of the pool turned unreachable within a lease: taken as unknown, not as dead."""
    STARTED_FROM_FILE = "started_from_file"
    """The store did not answer at start: the ring comes from the local file."""
    RING_FILE_BROKEN = "ring_file_broken"
    """The local ring file could not be read or written."""


EventHook = Callable[[ViewEvent, str], None]
"""Called with the event and the instance or cause it is about; it must not block."""
