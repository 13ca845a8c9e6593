"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from dualmap.simulator.policies.cache_affinity import CacheAffinity
from dualmap.simulator.policies.ceiling_central import CeilingCentral
from dualmap.simulator.policies.ceiling_shared_cache import CeilingSharedCache
from dualmap.simulator.policies.dualmap import DualMap
from dualmap.simulator.policies.dualmap_released import DualMapReleased
from dualmap.simulator.policies.least_loaded import LeastLoaded
from dualmap.simulator.policies.min_ttft import MinTtft
from dualmap.simulator.policies.placing import Policy
from dualmap.simulator.policies.preble import Preble
from dualmap.simulator.policies.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "dualmap": DualMap,
    "dualmap_released": DualMapReleased,
    "cache_affinity": CacheAffinity,
    "least_loaded": LeastLoaded,
    "min_ttft": MinTtft,
    "preble": Preble,
    "round_robin": RoundRobin,
    "ceiling_central": CeilingCentral,
    "ceiling_shared_cache": CeilingSharedCache,
}

CEILINGS = ("ceiling_central", "ceiling_shared_cache")
"""Policies with one queue for the whole cluster."""


def _dynamo() -> Policy:
    from dualmap.simulator.policies.dynamo import Dynamo  # noqa: PLC0415 - its sockets are for those who ask for it

    return Dynamo()


PEERS: dict[str, Callable[[], Policy]] = {"dynamo": _dynamo}
"""Policies that need a package of somebody else's (extra `peers`)."""


def policy_named(name: str) -> Policy:
    """A fresh policy.

    Raises:
        PeerMissingError: its package is not installed.
        KeyError: there is none of that name.
    """
    return (POLICIES.get(name) or PEERS[name])()


def installed(name: str) -> bool:
    """Whether a peer's package is there."""
    from dualmap.simulator.policies.dynamo import PeerMissingError, load_service  # noqa: PLC0415 - as above

    try:
        load_service()
    except PeerMissingError:
        return False
    return name in PEERS
