"""The agent's messages: what goes out comes back, and every refusal names its field."""

from __future__ import annotations

import struct
from contextlib import nullcontext

import pytest

from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingParameters
from dualmap.rpc.convert_agent import (
    MAX_MOVES,
    SubmissionDefaults,
    accept_message,
    accept_of,
    event_message,
    migration_of,
    outcome_message,
    outcome_of,
    submission_of,
    ticket_of,
)
from dualmap.rpc.convert_client import event_value
from dualmap.rpc.convert_offer import (
    MAX_OFFERS,
    OfferBatch,
    OfferItem,
    PullOrder,
    offer_message,
    offer_of,
    pull_message,
    pull_of,
)
from dualmap.rpc.convert_route import RouteRules, route_call
from dualmap.rpc.request_events import Accepted, AcceptOutcome, GaveWay, HandoverCause, Returned
from dualmap.rpc.route_values import Done, Event, FirstToken, HttpChunk, Pulse, Queued, Started, Tokens
from dualmap.v1 import agent_pb2, router_pb2, types_pb2

DEFAULTS = SubmissionDefaults("base", 5_000, RingParameters())
PROMPT = types_pb2.Prompt(token_ids=struct.pack("<300I", *range(300)))
EVENTS: list[Event] = [
    Queued("a/0", 3, 12.5),
    Started("a/0", 4.0),
    FirstToken("a/0", 10.0, 128, 300, 6.0, b"x"),
    Tokens(4, b"abcd"),
    HttpChunk(200, {"content-type": "text/event-stream"}, b"data"),
    Pulse(),
    Done("a/0", 5, 20.0, 10.0, 4.0, 128, 300, 1, "stop"),
]


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_comes_back_as_it_went(event: Event) -> None:
    """Client side and agent side agree on every event, alone and inside an Accept stream."""
    assert event_value(event_message(event)) == event
    assert outcome_of(outcome_message(event)) == event


@pytest.mark.parametrize("outcome", [Accepted(7), Returned("c/0", HandoverCause.PULL), GaveWay(3)])
def test_each_outcome_of_an_accept_comes_back_as_it_went(outcome: AcceptOutcome) -> None:
    """ACCEPTED, RETURNED, SUPERSEDED."""
    assert outcome_of(outcome_message(outcome)) == outcome


def test_an_outcome_of_a_later_version_is_a_sign_of_life() -> None:
    """Unknown is neither an end nor an error."""
    assert outcome_of(agent_pb2.AcceptResponse()) == Pulse()


def test_a_handed_over_request_goes_on_exactly_as_it_came() -> None:
    """All of the original travels, times as what is left and past."""
    message = agent_pb2.SubmitRequest(
        request_id="r",
        attempt=2,
        prompt=PROMPT,
        lora="l",
        cache_salt="s",
        priority=1,
        openai=agent_pb2.OpenAiBody(path="/v1/completions", body=b"{}", headers={"x": "y"}),
        ticket=types_pb2.Ticket(router_id=1, instance_id="a/0", sequence=4),
    )
    accept = agent_pb2.AcceptRequest(
        request=message,
        target_instance_id="b/0",
        origin_instance_id="a/0",
        handover=3,
        deadline_left_ms=-20.0,
        age_ms=400.0,
        cause=agent_pb2.HANDOVER_CAUSE_DRAIN,
        traceparent="00-1",
    )
    submission, handover = accept_of(accept, DEFAULTS)
    assert accept_message(submission, handover) == accept
    assert (submission.model, submission.ttft_slo_ms, submission.chain.prompt_tokens) == ("base", 5_000, 300)
    assert "prompt_tokens=300" in repr(submission)
    assert "token_ids" not in repr(submission)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"attempt": 70_000}, "attempt"),
        ({"priority": 2}, "priority"),
        ({"ttft_slo_ms": 3_600_001}, "ttft_slo_ms"),
        ({"age_ms": -1.0}, "age_ms"),
        ({"age_ms": float("nan")}, "age_ms"),
        ({"max_output_tokens": 1 << 21}, "max_output_tokens"),
        ({"lora": "x" * 600}, "lora"),
        ({"prompt": types_pb2.Prompt()}, "prompt"),
        ({"openai": agent_pb2.OpenAiBody(path="/v1/models")}, "openai.path"),
        ({"ticket": types_pb2.Ticket(instance_id="a/0", sequence=1)}, "ticket.router_id"),
    ],
)
def test_a_bad_submission_names_its_field(changes: dict[str, object], field: str) -> None:
    """Alone, and with its prefix inside an Accept."""
    fields = {"request_id": "r", "prompt": PROMPT, **changes}
    message = agent_pb2.SubmitRequest(**fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        submission_of(message, DEFAULTS)
    assert refused.value.field == field
    accept = agent_pb2.AcceptRequest(
        request=message,
        target_instance_id="b/0",
        origin_instance_id="a/0",
        handover=1,
        cause=agent_pb2.HANDOVER_CAUSE_PULL,
    )
    with pytest.raises(InvalidRequest) as refused:
        accept_of(accept, DEFAULTS)
    assert refused.value.field == f"request.{field}"


@pytest.mark.parametrize("field", ["request", "target_instance_id", "origin_instance_id", "handover", "cause"])
def test_a_bad_accept_names_its_field(field: str) -> None:
    """Each required field."""
    accept = agent_pb2.AcceptRequest(
        request=agent_pb2.SubmitRequest(request_id="r", prompt=PROMPT),
        target_instance_id="b/0",
        origin_instance_id="a/0",
        handover=1,
        cause=agent_pb2.HANDOVER_CAUSE_PULL,
    )
    accept.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as refused:
        accept_of(accept, DEFAULTS)
    assert refused.value.field == field


@pytest.mark.parametrize("field", ["deadline_left_ms", "age_ms"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_handed_over_time_that_is_no_number_is_refused(field: str, value: float) -> None:
    """It would be ordered nowhere, and wait for ever."""
    accept = agent_pb2.AcceptRequest(
        request=agent_pb2.SubmitRequest(request_id="r", prompt=PROMPT),
        target_instance_id="b/0",
        origin_instance_id="a/0",
        handover=1,
        cause=agent_pb2.HANDOVER_CAUSE_PULL,
    )
    setattr(accept, field, value)
    with pytest.raises(InvalidRequest) as refused:
        accept_of(accept, DEFAULTS)
    assert refused.value.field == field


def test_every_name_of_a_pool_hashes_alike_at_agent_and_router() -> None:
    """Names of one base model share its cache: an agent looks where the router looked."""
    named = agent_pb2.SubmitRequest(request_id="r", prompt=PROMPT, model="alias")
    submission = submission_of(named, DEFAULTS)
    rules = RouteRules(("base", "alias"), DEFAULTS.parameters, 5.0, b"")
    asked = router_pb2.RouteRequest(request_id="r", prompt=PROMPT, model="alias")
    assert submission.model == "alias"
    assert submission.chain == route_call(asked, 0, rules).query.chain


@pytest.mark.parametrize(("characters", "taken"), [(128, True), (129, False)])
def test_router_and_agent_take_ids_of_the_same_length(characters: int, taken: bool) -> None:
    """What was routed is never refused by the agent for its id."""
    name = "x" * characters
    rules = RouteRules(("base",), DEFAULTS.parameters, 5.0, b"")
    for read in (
        lambda: route_call(router_pb2.RouteRequest(request_id=name, prompt=PROMPT), 0, rules),
        lambda: submission_of(agent_pb2.SubmitRequest(request_id=name, prompt=PROMPT), DEFAULTS),
    ):
        with nullcontext() if taken else pytest.raises(InvalidRequest, match=str(characters)):
            read()


def test_a_tickets_pair_comes_with_it() -> None:
    """The chosen first; an absent backup is none."""
    message = types_pb2.Ticket(
        router_id=1, instance_id="a/0", sequence=1, chosen=types_pb2.Promise(instance_id="a/0", hit_tokens=128)
    )
    assert ticket_of(message).candidate_ids == ("a/0",)
    message.backup.instance_id = "b/0"
    assert ticket_of(message).candidate_ids == ("a/0", "b/0")


def test_a_bad_move_names_its_item() -> None:
    """The index is in the field; too many are refused as a whole."""
    good = agent_pb2.MigrateItem(request_id="r", target_instance_id="b/0")
    with pytest.raises(InvalidRequest) as refused:
        migration_of(agent_pb2.MigrateRequest(items=[good, agent_pb2.MigrateItem(request_id="r")]))
    assert refused.value.field == "items[1].target_instance_id"
    with pytest.raises(InvalidRequest) as refused:
        migration_of(agent_pb2.MigrateRequest(items=[good] * (MAX_MOVES + 1)))
    assert refused.value.field == "items"
    assert migration_of(agent_pb2.MigrateRequest(items=[good])).moves[0].attempt == 1


def test_offers_and_pulls_come_back_as_they_went() -> None:
    """With and without a chain; a chain too long stays at home."""
    chain = Chain(ChainKind.TOKENS, [1, 2], 128, 300)
    long = Chain(ChainKind.TOKENS, list(range(2_000)), 1, 2_000)
    items = tuple(
        OfferItem(f"r{i}", 1, -5.0, 7.0, -1, 300, 100, 200, 9, each) for i, each in enumerate((chain, None, long))
    )
    batch = OfferBatch("a/0", "b/0", items, ("gone",))
    back = offer_of(offer_message(batch))
    assert back.offers[:2] == items[:2]
    assert back.offers[2].chain is None
    assert back.withdrawn == ("gone",)
    order = PullOrder("a/0", "b/0", "r", 2)
    assert pull_of(pull_message(order)) == order


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (agent_pb2.OfferRequest(target_instance_id="b/0"), "holder_instance_id"),
        (
            agent_pb2.OfferRequest(
                holder_instance_id="a/0",
                target_instance_id="b/0",
                offers=[agent_pb2.OfferEntry(request_id="r", deadline_ms=float("nan"))],
            ),
            "offers[0].deadline_ms",
        ),
        (
            agent_pb2.OfferRequest(
                holder_instance_id="a/0",
                target_instance_id="b/0",
                offers=[agent_pb2.OfferEntry(request_id="r")] * (MAX_OFFERS + 1),
            ),
            "offers",
        ),
    ],
)
def test_a_bad_offer_names_its_field(message: agent_pb2.OfferRequest, field: str) -> None:
    """Bounds, numbers, required fields."""
    with pytest.raises(InvalidRequest) as refused:
        offer_of(message)
    assert refused.value.field == field
