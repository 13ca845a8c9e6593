"""(request id, attempt) is one decision: repeated, refused or superseded as the contract says."""

from __future__ import annotations

import grpc
import pytest

from dualmap.core.membership import InstanceState
from dualmap.rpc.status import problem_of
from dualmap.v1 import router_pb2
from services.router.answers import Answers
from tests.services.router.harness import Router, chain_of_blocks, request


def code_of(router: Router, message: router_pb2.RouteRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        router.route(message)
    return problem_of(failed.value).code


def booked(router: Router) -> int:
    return sum(len(view.bookings) for view in router.pool.view.instances.values())


def test_a_repeated_request_gets_the_same_answer_and_books_once(router: Router) -> None:
    """A client that lost the answer asks again and gets the very same, ticket included."""
    message = request("r", chain_of_blocks(1, 4))

    first, second = router.route(message), router.route(message)

    assert first == second
    assert booked(router) == 1
    assert router.metrics.counts["repeated"] == 1


def test_after_thirty_seconds_it_is_a_new_decision(router: Router) -> None:
    """The memory is bounded by age."""
    message = request("r", chain_of_blocks(1, 4))
    router.route(message)
    router.pool.clock.ms += 30_001

    assert router.route(message).ticket.sequence == 2


def test_other_content_under_the_same_identity_is_refused(router: Router) -> None:
    """ALREADY_EXISTS: the id or the attempt is wrong."""
    router.route(request("r", chain_of_blocks(1, 4)))

    assert code_of(router, request("r", chain_of_blocks(2, 4))) is grpc.StatusCode.ALREADY_EXISTS
    assert code_of(router, request("r", chain_of_blocks(1, 4), priority=1)) is grpc.StatusCode.ALREADY_EXISTS


def test_a_repeat_whose_instance_takes_no_work_is_aborted(router: Router) -> None:
    """ABORTED until the client uses attempt + 1, which goes elsewhere."""
    message = request("r", chain_of_blocks(1, 4))
    instance_id = router.route(message).instance.instance_id
    router.pool.set_state(instance_id, InstanceState.DRAINING)

    assert code_of(router, message) is grpc.StatusCode.ABORTED
    again = router.route(request("r", chain_of_blocks(1, 4), attempt=2))
    assert again.instance.instance_id != instance_id
    assert again.ticket.attempt == 2


def test_a_higher_attempt_releases_the_older_booking(router: Router) -> None:
    """Only one attempt of a request is ever booked, and a lower one that comes late is aborted."""
    router.route(request("r", chain_of_blocks(1, 4)))
    router.route(request("r", chain_of_blocks(1, 4), attempt=3))

    assert booked(router) == 1
    assert router.metrics.counts["superseded"] == 1
    assert code_of(router, request("r", chain_of_blocks(1, 4), attempt=2)) is grpc.StatusCode.ABORTED


def test_an_absent_attempt_is_the_first(router: Router) -> None:
    """Attempt 0 and 1 are one."""
    message = request("r", chain_of_blocks(1, 4), attempt=0)

    assert router.route(message).attempt == 1
    assert code_of(router, request("r", chain_of_blocks(9, 4), attempt=1)) is grpc.StatusCode.ALREADY_EXISTS


def test_a_refused_request_leaves_no_trace(router: Router) -> None:
    """What was not decided can be asked again under the same identity."""
    for instance_id in tuple(router.pool.view.instances):
        router.pool.set_state(instance_id, InstanceState.SUSPECT)
    message = request("r", chain_of_blocks(1, 4))
    assert code_of(router, message) is grpc.StatusCode.UNAVAILABLE

    router.pool.set_state("agent-1/0", InstanceState.ACTIVE)

    assert router.route(message).instance.instance_id == "agent-1/0"


def test_answers_forgotten_early_are_counted(router: Router) -> None:
    """The memory is bounded by count too; overflow shows in a counter, age does not."""
    answers = Answers(capacity=4, keep_ms=100)
    router.decider._answers = answers
    for number in range(10):
        router.route(request(f"r{number}", chain_of_blocks(number, 2)))
    assert len(answers) == 4
    assert answers.overflowed == 6

    router.pool.clock.ms += 200
    router.decider.expire()

    assert len(answers) == 0
    assert answers.overflowed == 6
