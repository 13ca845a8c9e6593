"""What the answer writer writes is what generated code reads: every field, for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.choose import Candidate, Decision, Reason
from dualmap.core.membership import InstanceState, Member
from dualmap.rpc.route_answer import AnswerWriter, streamed_answer
from dualmap.runtime.varint import varint
from dualmap.v1 import router_pb2
from dualmap.v1.types_pb2 import InstanceAddress, Promise, Ticket

MEMBERS = (
    Member("agent-1/0", "10.0.0.1:7080", "10.0.0.1:8080", InstanceState.ACTIVE),
    Member("agent-é/1", "10.0.0.2:7080", "", InstanceState.ACTIVE),
)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6)


def candidate(name: str, hit: int, predicted_s: float, age_ms: float) -> Candidate:
    return Candidate(name, "pair_1", hit, hit, 0, 0.0, 0.0, 0.0, predicted_s, age_ms, True)


@given(
    request_id=st.text(min_size=1, max_size=128),
    numbers=st.tuples(U32, U32, U32, U64, U64, U64, U64, U64),
    floats=st.tuples(SECONDS, SECONDS, st.floats(-1, 1e9)),
    reason=st.sampled_from(Reason),
    backup=st.booleans(),
    traceparent=st.sampled_from(["", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"]),
)
def test_an_answer_reads_as_it_was_meant(  # noqa: PLR0917
    request_id: str,
    numbers: tuple[int, ...],
    floats: tuple[float, float, float],
    reason: Reason,
    backup: bool,
    traceparent: str,
) -> None:
    """Generated code finds in the bytes exactly the message that it would have made itself."""
    attempt, hit, tokens, router_id, epoch, sequence, key, digest = numbers
    predicted_s, other_s, age_ms = floats
    chosen, other = candidate("agent-1/0", hit, predicted_s, age_ms), candidate("agent-é/1", tokens, other_s, 0.0)
    decision = Decision(chosen, other if backup else None, reason, key, hit, (chosen, other), 5, 1)
    writer = AnswerWriter(router_id, "pool-a", epoch, digest, MEMBERS)

    raw = writer.write(request_id, attempt, decision, tokens, epoch, sequence, traceparent)

    expected = router_pb2.RouteResponse(
        request_id=request_id,
        instance=InstanceAddress(instance_id="agent-1/0", grpc_address="10.0.0.1:7080", http_address="10.0.0.1:8080"),
        ticket=Ticket(
            router_id=router_id,
            instance_id="agent-1/0",
            agent_epoch=epoch,
            sequence=sequence,
            attempt=attempt,
            pool="pool-a",
            ring_epoch=epoch,
            parameters_digest=digest,
            chosen=Promise(instance_id="agent-1/0", hit_tokens=hit, predicted_ttft_ms=predicted_s * 1000),
            key=key,
            key_blocks=hit,
            prompt_tokens=tokens,
            traceparent=traceparent,
            reason=int(reason),  # type: ignore[arg-type]
        ),
        reason=int(reason),  # type: ignore[arg-type]
        predicted_ttft_ms=predicted_s * 1000,
        hit_tokens=hit,
        key_blocks=hit,
        ring_epoch=epoch,
        state_age_ms=age_ms,
        attempt=attempt,
    )
    if backup:
        expected.backup.instance_id, expected.backup.grpc_address = "agent-é/1", "10.0.0.2:7080"
        expected.ticket.backup.instance_id = "agent-é/1"
        expected.ticket.backup.hit_tokens, expected.ticket.backup.predicted_ttft_ms = tokens, other_s * 1000
    assert router_pb2.RouteResponse.FromString(raw) == expected


def test_a_streamed_answer_is_the_answer_with_its_id() -> None:
    """Generated code reads the same message out of it."""
    answer = router_pb2.RouteResponse(request_id="é", hit_tokens=300, instance=InstanceAddress(instance_id="a" * 200))

    read = router_pb2.RouteStreamResponse.FromString(streamed_answer("é", answer.SerializeToString()))

    assert read == router_pb2.RouteStreamResponse(request_id="é", response=answer)


@pytest.mark.parametrize(
    ("number", "raw"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\1"), (16_384, b"\x80\x80\1"), (2**64 - 1, None)]
)
def test_numbers_are_written_in_as_few_bytes_as_they_need(number: int, raw: bytes | None) -> None:
    """Seven bits a byte, lowest first."""
    assert varint(number) == (raw or b"\xff" * 9 + b"\1")


def test_every_field_of_the_answer_is_written() -> None:
    """A field added to the contract is not left out in silence."""
    known = {"request_id", "instance", "backup", "ticket", "reason", "predicted_ttft_ms", "hit_tokens", "key_blocks"}
    known |= {"ring_epoch", "state_age_ms", "attempt"}
    ticket = {"router_id", "instance_id", "agent_epoch", "sequence", "attempt", "pool", "ring_epoch", "key", "reason"}
    ticket |= {"parameters_digest", "chosen", "backup", "key_blocks", "prompt_tokens", "traceparent"}

    assert set(router_pb2.RouteResponse.DESCRIPTOR.fields_by_name) == known
    assert set(Ticket.DESCRIPTOR.fields_by_name) == ticket
