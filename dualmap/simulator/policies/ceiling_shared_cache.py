"""Ceiling: one queue and one cache without limit that every instance reads at no cost."""

from __future__ import annotations

from typing import ClassVar

from dualmap.simulator.policies.ceiling_central import CeilingCentral


class CeilingSharedCache(CeilingCentral):
    """No routing, and nothing is ever computed twice."""

    name: ClassVar[str] = "ceiling_shared_cache"
    shared_cache: ClassVar[bool] = True
