"""Explain, what-if and GetView: numbers and hashes, and nothing booked by asking."""

from __future__ import annotations

import grpc
import pytest

from dualmap.core.state import LoadReport
from dualmap.rpc.status import problem_of
from dualmap.v1 import router_pb2
from dualmap.v1.types_pb2 import Prompt
from services.router.history import History
from tests.services.router.harness import AGENT_EPOCH, ROUTER_ID, Router, chain_of_blocks, request


def explain(router: Router, **subject: object) -> router_pb2.ExplainResponse:
    return router.stub.Explain(router_pb2.ExplainRequest(**subject), timeout=5)  # type: ignore[arg-type]


def test_a_recent_request_is_explained(router: Router) -> None:
    """The rule, the key and all that was looked at, with the one that was chosen."""
    answer = router.route(request("r", chain_of_blocks(1, 10), ttft_slo_ms=2_000))
    router.pool.clock.ms += 40

    said = explain(router, request_id="r")

    assert (said.request_id, said.attempt, said.reason) == ("r", 1, answer.reason)
    assert (said.ring_epoch, said.router_id, said.ttft_slo_ms, said.decided_ago_ms) == (5, ROUTER_ID, 2_000, 40)
    assert said.rule.endswith(".")
    assert (said.key, said.key_blocks) == (answer.ticket.key, 1)
    assert [found.role for found in said.candidates][:2] == ["pair_1", "pair_2"]
    assert [found.instance_id for found in said.candidates if found.chosen] == [answer.instance.instance_id]


def test_an_unknown_or_empty_subject_is_refused(router: Router) -> None:
    """NOT_FOUND for what was never decided here, INVALID_ARGUMENT for nothing."""
    with pytest.raises(grpc.RpcError) as unknown:
        explain(router, request_id="never")
    with pytest.raises(grpc.RpcError) as empty:
        explain(router)

    assert problem_of(unknown.value).code is grpc.StatusCode.NOT_FOUND
    assert problem_of(empty.value).code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_what_if_books_nothing(router: Router) -> None:
    """The same prompt asked about and then routed goes where it was said; asking left nothing behind."""
    message = request("", chain_of_blocks(4, 6))

    said = explain(router, what_if=message)
    booked = [len(view.bookings) for view in router.pool.view.instances.values()]
    answer = router.route(request("r", chain_of_blocks(4, 6)))

    assert sum(booked) == 0
    assert [found.instance_id for found in said.candidates if found.chosen] == [answer.instance.instance_id]
    assert (said.request_id, said.decided_ago_ms) == ("", 0)
    assert answer.ticket.sequence == 1


def test_a_malformed_what_if_is_refused_by_field(router: Router) -> None:
    """A what-if is checked like a route."""
    with pytest.raises(grpc.RpcError) as failed:
        explain(router, what_if=router_pb2.RouteRequest(prompt=Prompt(token_ids=b"1")))

    assert "prompt.token_ids" in problem_of(failed.value).message


def test_only_so_many_decisions_are_kept(router: Router) -> None:
    """The history is bounded, and forgets the oldest."""
    router.decider._history = History(capacity=3)
    for number in range(5):
        router.route(request(f"r{number}", (1,)))

    assert explain(router, request_id="r4").request_id == "r4"
    with pytest.raises(grpc.RpcError):
        explain(router, request_id="r1")


def test_the_view_shows_versions_counts_and_digests(router: Router) -> None:
    """What two routers must agree on can be compared."""
    router.pool.hear("agent-0/0", LoadReport(), chain_of_blocks(1, 5))
    router.pool.clock.ms += 70

    view = router.stub.GetView(router_pb2.GetViewRequest(instance_ids=["agent-0/0", "nobody"]), timeout=5)

    (found,) = view.instances
    assert (found.version, found.incarnation, found.agent_epoch) == (2, 1, AGENT_EPOCH)
    assert (found.kv_blocks, found.state_age_ms, found.reachable) == (5, 70, True)
    assert found.kv_digest == router.pool.view.instances["agent-0/0"].kv.digest
    assert (view.router_id, view.ring_epoch, view.degraded) == (ROUTER_ID, 5, False)
