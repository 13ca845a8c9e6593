"""The central queue: what it keeps per instance is what a fresh look would find."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.central import CentralQueue
from dualmap.simulator.cluster import Cluster
from dualmap.simulator.options import EXACT, ClusterOptions, TimetableEntry, simulated_engine
from dualmap.simulator.registry import POLICIES
from dualmap.simulator.requests import chains_of, sim_requests
from dualmap.simulator.synthetic import synthetic_trace

SMALL = ClusterOptions(instances=3, engine=simulated_engine(kv_tokens=30_000))


@pytest.mark.parametrize("policy", ["ceiling_central", "ceiling_shared_cache"])
@pytest.mark.parametrize("fit_cost", [False, True])
def test_kept_costs_are_those_of_a_fresh_look(policy: str, fit_cost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stored and evicted, a cache lost, a cost learnt anew: every pick weighs what is true then."""
    looked = 0
    plain = CentralQueue.pick

    def checked(self: CentralQueue, *arguments: object) -> object:
        nonlocal looked
        answer = plain(self, *arguments)  # type: ignore[arg-type]
        for instance in cluster.instances.values():
            column = self._columns.get(instance.instance_id)
            for _, _, request in self._ordered if column is not None else ():
                assert column is not None
                assert column.costs[request.request_id] == instance.cost_s(request.chain)
                looked += 1
        return answer

    monkeypatch.setattr(CentralQueue, "pick", checked)
    made = poisson_arrivals(synthetic_trace("skew", 200, 1), 9.0, 1)
    table = [TimetableEntry(5.0, "fail", 1), TimetableEntry(10.0, "restart", 1), TimetableEntry(12.0, "join", 3)]
    options = replace(SMALL, timetable=table, control=replace(EXACT, fit_cost=fit_cost))
    if policy == "ceiling_shared_cache":
        options = replace(options, timetable=())
    cluster = Cluster(sim_requests(made, chains_of(made), 5.0), POLICIES[policy](), options)
    result = cluster.run()

    assert looked > 1_000
    assert all(request.failed or request.done_s is not None for request in result.requests)
