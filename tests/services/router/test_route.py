"""Route end to end: real calls to a real server, over a view filled by hand."""

from __future__ import annotations

import struct
from collections import Counter

import grpc
import pytest

from dualmap.core.choose import ChooseOptions
from dualmap.core.membership import InstanceState
from dualmap.core.state import LoadReport, TicketsSeen
from dualmap.rpc.status import Problem, problem_of
from dualmap.v1 import router_pb2
from dualmap.v1.types_pb2 import REASON_CACHE_HIT, REASON_DEGRADED, REASON_NO_KEY, Prompt
from tests.services.router.harness import (
    AGENT_EPOCH,
    ROUTER_ID,
    Limits,
    Router,
    chain_of_blocks,
    pool_of,
    request,
    running_router,
)


def problem(router: Router, message: router_pb2.RouteRequest) -> Problem:
    with pytest.raises(grpc.RpcError) as failed:
        router.route(message)
    return problem_of(failed.value)


def test_an_answer_says_where_and_its_ticket_says_all(router: Router) -> None:
    """Instance, backup, addresses and a ticket with the promises of both."""
    answer = router.route(request("r", chain_of_blocks(1, 10), prompt_tokens=1300))

    ticket = answer.ticket
    assert answer.instance.grpc_address.startswith("127.0.0.1:71")
    assert answer.instance.http_address.startswith("127.0.0.1:81")
    assert answer.backup.instance_id not in ("", answer.instance.instance_id)
    assert (answer.request_id, answer.attempt, answer.ring_epoch, answer.key_blocks) == ("r", 1, 5, 1)
    assert (ticket.router_id, ticket.agent_epoch, ticket.sequence) == (ROUTER_ID, AGENT_EPOCH, 1)
    assert (ticket.instance_id, ticket.pool, ticket.prompt_tokens) == (answer.instance.instance_id, "default", 1300)
    assert (ticket.chosen.instance_id, ticket.backup.instance_id) == (
        answer.instance.instance_id,
        answer.backup.instance_id,
    )
    assert ticket.parameters_digest
    assert ticket.key
    assert ticket.chosen.predicted_ttft_ms > 0
    assert answer.reason == ticket.reason


def test_requests_with_one_prefix_follow_the_cache(router: Router) -> None:
    """The holder of the prefix gets the next request with it, and the promise counts its blocks."""
    hashes = chain_of_blocks(2, 20)
    first = router.route(request("a", hashes))
    router.pool.hear(first.instance.instance_id, LoadReport(), hashes)

    second = router.route(request("b", hashes))

    assert second.instance.instance_id == first.instance.instance_id
    assert (second.reason, second.hit_tokens) == (REASON_CACHE_HIT, 20 * 128)


def test_booked_work_is_seen_by_the_next_decision(router: Router) -> None:
    """Fresh prefixes between two reports spread over the pool instead of herding to one idle instance."""
    placed = Counter(
        router.route(request(f"r{number}", chain_of_blocks(100 + number, 64))).instance.instance_id
        for number in range(64)
    )

    assert max(placed.values()) <= 64 / 4 + 8


def test_sequences_have_no_gaps_and_a_report_covers_its_bookings(router: Router) -> None:
    """Each instance's tickets count from 1; what its agent has seen is no longer booked."""
    sequences: dict[str, list[int]] = {}
    for number in range(40):
        answer = router.route(request(f"r{number}", chain_of_blocks(number, 3)))
        sequences.setdefault(answer.instance.instance_id, []).append(answer.ticket.sequence)
    assert all(seen == list(range(1, len(seen) + 1)) for seen in sequences.values())

    for instance_id, seen in sequences.items():
        router.pool.hear(instance_id, LoadReport(tickets=(TicketsSeen(ROUTER_ID, seen[-1] - 1),)))

    view = router.stub.GetView(router_pb2.GetViewRequest(), timeout=5)
    assert {
        found.instance_id: found.bookings for found in view.instances if found.instance_id in sequences
    } == dict.fromkeys(sequences, 1)


def test_bookings_expire_and_the_expiry_is_counted(router: Router) -> None:
    """What no report covers within its time to live is dropped."""
    router.route(request("r", chain_of_blocks(1, 4)))
    router.pool.clock.ms += 2_001
    router.decider.expire()

    view = router.stub.GetView(router_pb2.GetViewRequest(), timeout=5)
    assert sum(found.bookings for found in view.instances) == 0
    assert router.metrics.counts["expired"] == 1


def test_a_released_booking_is_gone_and_a_second_release_says_so(router: Router) -> None:
    """Release is idempotent, and knows only what was booked."""
    router.route(request("r", chain_of_blocks(1, 4)))
    release = router_pb2.ReleaseRequest(request_id="r")

    assert router.stub.Release(release, timeout=5).released
    assert not router.stub.Release(release, timeout=5).released
    assert not router.stub.Release(router_pb2.ReleaseRequest(request_id="never"), timeout=5).released
    assert sum(view.bookings.booked_s for view in router.pool.view.instances.values()) == 0


def test_prompts_of_every_form_are_routed(router: Router) -> None:
    """Token ids, text and hashes; the same tokens give the same pair in either form."""
    ids = struct.pack("<1024I", *range(1024))
    by_tokens = router.route(router_pb2.RouteRequest(request_id="t", prompt=Prompt(token_ids=ids)))
    by_text = router.route(router_pb2.RouteRequest(request_id="x", prompt=Prompt(text="word " * 400)))

    assert by_tokens.ticket.prompt_tokens == 1024
    assert by_text.ticket.prompt_tokens == 500
    assert by_text.key_blocks == by_tokens.key_blocks == 1


def test_a_prompt_without_a_full_block_is_spread_by_its_id(router: Router) -> None:
    """No key is a reason of its own, never an error."""
    answers = [router.route(router_pb2.RouteRequest(request_id=f"s{n}", prompt=Prompt(text="hi"))) for n in range(32)]

    assert {answer.reason for answer in answers} == {REASON_NO_KEY}
    assert len({answer.instance.instance_id for answer in answers}) == 4


def test_excluded_and_suspect_instances_are_not_chosen(router: Router) -> None:
    """The rest of the pair, then the next clockwise, takes over."""
    hashes = chain_of_blocks(3, 8)
    first = router.route(request("a", hashes)).instance.instance_id
    second = router.route(request("b", hashes, exclude_instance_ids=[first])).instance.instance_id
    router.pool.set_state(second, InstanceState.SUSPECT)
    third = router.route(request("c", hashes, exclude_instance_ids=[first])).instance.instance_id

    assert len({first, second, third}) == 3


def test_old_state_is_a_reason_never_an_error(router: Router) -> None:
    """With the collector gone, routes go on by hash and own bookings and say DEGRADED."""
    router.pool.clock.ms += 60_000

    answer = router.route(request("r", chain_of_blocks(1, 4)))

    assert (answer.reason, answer.state_age_ms) == (REASON_DEGRADED, 60_000)


BAD = [
    (request(""), "request_id"),
    (request("x" * 129), "request_id"),
    (request("r", attempt=65_535), "attempt"),
    (request("r", priority=2), "priority"),
    (request("r", ttft_slo_ms=3_600_001), "ttft_slo_ms"),
    (request("r", cache_salt="x" * 257), "cache_salt"),
    (request("r", lora="x" * 257), "lora"),
    (request("r", exclude_instance_ids=[str(n) for n in range(65)]), "exclude_instance_ids"),
    (request("r", exclude_instance_ids=["x" * 257]), "exclude_instance_ids"),
    (router_pb2.RouteRequest(request_id="r"), "prompt"),
    (router_pb2.RouteRequest(request_id="r", prompt=Prompt(token_ids=b"123")), "prompt.token_ids"),
]


@pytest.mark.parametrize(("message", "field"), BAD)
def test_a_malformed_request_is_refused_by_field_and_books_nothing(
    router: Router, message: router_pb2.RouteRequest, field: str
) -> None:
    """INVALID_ARGUMENT naming the field."""
    found = problem(router, message)

    assert found.code is grpc.StatusCode.INVALID_ARGUMENT
    assert found.fields["field"] == field
    assert field in found.message
    assert all(len(view.bookings) == 0 for view in router.pool.view.instances.values())


@pytest.mark.parametrize(
    "raw",
    [
        request("r", (1,)).SerializeToString()
        + router_pb2.RouteRequest(prompt=Prompt(text="second prompt")).SerializeToString(),
        b"\xff\xff\xff",
    ],
)
def test_two_prompts_and_foreign_bytes_are_refused(router: Router, raw: bytes) -> None:
    """What generated code would take in silence, or answer INTERNAL, is INVALID_ARGUMENT."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = router.channel.unary_unary("/dualmap.v1.Router/Route")
    with pytest.raises(grpc.RpcError) as failed:
        call(raw, timeout=5)

    assert problem_of(failed.value).code is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_model_is_told_the_known_ones(router: Router) -> None:
    """NOT_FOUND names what is served; an alias is served, and hashes as the pool's first name."""
    found = problem(router, request("r", (1,), model="gpt"))
    by_alias = router.route(router_pb2.RouteRequest(request_id="a", model="alias", prompt=Prompt(text="w " * 600)))
    by_name = router.route(router_pb2.RouteRequest(request_id="b", model="default", prompt=Prompt(text="w " * 600)))

    assert found.code is grpc.StatusCode.NOT_FOUND
    assert "default" in found.message
    assert "alias" in found.message
    assert by_alias.ticket.key == by_name.ticket.key


def test_nobody_there_is_unavailable_with_advice() -> None:
    """No ring yet, and no eligible instance: UNAVAILABLE with a retry delay."""
    with running_router(pool_of(0)) as unready:
        early = problem(unready, request("r", (1,)))
    with running_router(pool_of(1)) as alone:
        alone.pool.set_state("agent-0/0", InstanceState.DRAINING)
        empty = problem(alone, request("r", (1,)))

    for found in (early, empty):
        assert found.code is grpc.StatusCode.UNAVAILABLE
        assert found.retry_after_ms


def test_nobody_admitting_is_exhausted_with_the_least_drain() -> None:
    """RESOURCE_EXHAUSTED, with the least predicted drain of those looked at as the delay."""
    with running_router(pool_of(4), Limits(options=ChooseOptions(looks=4))) as router:
        for instance_id in router.pool.view.instances:
            router.pool.hear(instance_id, LoadReport(admitting=False, rest_s=2.0))

        found = problem(router, request("r", (1,)))

    assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert found.retry_after_ms == 2_000


def test_an_over_long_message_is_refused_and_the_connection_kept() -> None:
    """Over the limit: RESOURCE_EXHAUSTED; the next call on the same channel is served."""
    with running_router(pool_of(2), Limits(message_bytes=64 * 1024)) as router:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = router.channel.unary_unary("/dualmap.v1.Router/Route")
        with pytest.raises(grpc.RpcError) as failed:
            call(b"\x32" * 100_000, timeout=5)

        assert problem_of(failed.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert router.route(request("r", (1,))).instance.instance_id


def test_routes_are_counted_by_instance_and_reason(router: Router) -> None:
    """Every decision has its counter, labelled pool, instance and reason only."""
    answer = router.route(request("r", chain_of_blocks(1, 4)))

    labels = {"pool": "default", "instance": answer.instance.instance_id, "reason": "LESS_LOADED"}
    assert router.registry.get_sample_value("dualmap_router_routes_total", labels) == 1
    assert router.registry.get_sample_value("dualmap_router_decision_seconds_count", {"pool": "default"}) == 1
    assert router.registry.get_sample_value("dualmap_router_prompt_tokens_total", {"pool": "default"}) == 512


def test_series_of_the_departed_go_after_five_minutes(router: Router) -> None:
    """An instance that left does not stay in the metrics for ever."""
    instance_id = router.route(request("r", chain_of_blocks(1, 4))).instance.instance_id
    labels = {"pool": "default", "instance": instance_id, "reason": "LESS_LOADED"}
    router.decider.expire()
    router.pool.set_state(instance_id, InstanceState.LEFT)
    router.pool.clock.ms += 299_000
    router.decider.expire()
    assert router.registry.get_sample_value("dualmap_router_routes_total", labels) == 1

    router.pool.clock.ms += 2_000
    router.decider.expire()

    assert router.registry.get_sample_value("dualmap_router_routes_total", labels) is None
