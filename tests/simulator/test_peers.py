"""Policies of others' packages: asked as their users would, or refused in one line."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from dualmap.core.state import QueuePolicy
from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.cluster import run_cluster
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.policies.dynamo import PeerMissingError
from dualmap.simulator.registry import policy_named
from dualmap.simulator.report import measure
from dualmap.simulator.requests import chains_of, sim_requests
from dualmap.simulator.synthetic import synthetic_trace

INSTALLED = importlib.util.find_spec("dynamo") is not None


@pytest.mark.skipif(INSTALLED, reason="the extra peers is installed")
def test_a_missing_peer_is_told_in_one_line() -> None:
    """What is missing and how to get it."""
    with pytest.raises(PeerMissingError, match=r"ai-dynamo-runtime.*dualmap\[peers\]"):
        policy_named("dynamo")


@pytest.mark.skipif(not INSTALLED, reason="needs the extra peers")
def test_dynamo_sees_the_caches_and_places_everything() -> None:
    """Its selection service, fed by KV events, finds prefixes: more hits than a policy that ignores caches."""
    made = poisson_arrivals(synthetic_trace("chat", 300, 1), 10.0, 1)
    options = replace(ClusterOptions(instances=4), queue=QueuePolicy.FIFO)
    found = {
        name: measure(run_cluster(sim_requests(made, chains_of(made), 5.0), policy_named(name), options), 50)
        for name in ("dynamo", "round_robin")
    }

    assert found["dynamo"].failed == 0
    assert found["dynamo"].hit_rate > found["round_robin"].hit_rate
