"""RouteResponse as bytes, from pieces made once a ring: building a generated message costs a sixth of a route.

What it writes is what generated code would read; the tests hold it to that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from google.protobuf.descriptor import FieldDescriptor

from dualmap.core.choose import Candidate, Decision
from dualmap.core.membership import Member
from dualmap.runtime.varint import varint
from dualmap.v1 import router_pb2, types_pb2

_DOUBLE = struct.Struct("<d").pack
_FIXED64 = struct.Struct("<Q").pack

_RESPONSE = router_pb2.RouteResponse.DESCRIPTOR.fields_by_name
_TICKET = types_pb2.Ticket.DESCRIPTOR.fields_by_name
_PROMISE = types_pb2.Promise.DESCRIPTOR.fields_by_name
_VARINT, _EIGHT_BYTES, _LENGTH = 0, 1, 2


def _tags(fields: Mapping[str, FieldDescriptor], kind: int, *names: str) -> tuple[bytes, ...]:
    return tuple(varint(fields[name].number << 3 | kind) for name in names)


_ID, _INSTANCE, _BACKUP, _TICKET_OF = _tags(_RESPONSE, _LENGTH, "request_id", "instance", "backup", "ticket")
_REASON, _HIT, _KEY_BLOCKS, _EPOCH, _ATTEMPT = _tags(
    _RESPONSE, _VARINT, "reason", "hit_tokens", "key_blocks", "ring_epoch", "attempt"
)
_PREDICTED, _AGE = _tags(_RESPONSE, _EIGHT_BYTES, "predicted_ttft_ms", "state_age_ms")
_T_INSTANCE, _T_POOL, _T_CHOSEN, _T_BACKUP, _T_TRACE = _tags(
    _TICKET, _LENGTH, "instance_id", "pool", "chosen", "backup", "traceparent"
)
_T_LIFE, _T_SEQUENCE, _T_ATTEMPT, _T_EPOCH, _T_KEY_BLOCKS, _T_TOKENS, _T_REASON = _tags(
    _TICKET, _VARINT, "agent_epoch", "sequence", "attempt", "ring_epoch", "key_blocks", "prompt_tokens", "reason"
)
_T_ROUTER, _T_DIGEST, _T_KEY = _tags(_TICKET, _EIGHT_BYTES, "router_id", "parameters_digest", "key")
_S_ID, _S_RESPONSE = _tags(router_pb2.RouteStreamResponse.DESCRIPTOR.fields_by_name, _LENGTH, "request_id", "response")
(_P_INSTANCE,) = _tags(_PROMISE, _LENGTH, "instance_id")
(_P_HIT,) = _tags(_PROMISE, _VARINT, "hit_tokens")
(_P_PREDICTED,) = _tags(_PROMISE, _EIGHT_BYTES, "predicted_ttft_ms")


class _Pieces:
    """What of an answer depends on the instance alone."""

    __slots__ = ("as_backup", "as_instance", "of_promise", "of_ticket")

    def __init__(self, member: Member) -> None:
        address = types_pb2.InstanceAddress(
            instance_id=member.instance_id, grpc_address=member.grpc_address, http_address=member.http_address
        ).SerializeToString()
        name = member.instance_id.encode()
        self.as_instance = _sized(_INSTANCE, address)
        self.as_backup = _sized(_BACKUP, address)
        self.of_promise = _sized(_P_INSTANCE, name)
        self.of_ticket = _sized(_T_INSTANCE, name)


class AnswerWriter:
    """Writes answers under one ring."""

    __slots__ = ("_epoch", "_pieces", "_ticket_head")

    def __init__(
        self, router_id: int, pool: str, ring_epoch: int, parameters_digest: int, members: Iterable[Member]
    ) -> None:
        self._pieces = {member.instance_id: _Pieces(member) for member in members}
        self._epoch = _EPOCH + varint(ring_epoch)
        self._ticket_head = b"".join(
            (
                _T_ROUTER,
                _FIXED64(router_id),
                _sized(_T_POOL, pool.encode()),
                _T_EPOCH,
                varint(ring_epoch),
                _T_DIGEST,
                _FIXED64(parameters_digest),
            )
        )

    def write(  # noqa: PLR0917  (all that differs from answer to answer, on the path of every route)
        self,
        request_id: str,
        attempt: int,
        decision: Decision,
        prompt_tokens: int,
        agent_epoch: int,
        sequence: int,
        traceparent: str = "",
    ) -> bytes:
        """The RouteResponse with its ticket."""
        chosen, backup = decision.chosen, decision.backup
        pieces = self._pieces[chosen.instance_id]
        reason, key_blocks, tries = varint(decision.reason), varint(decision.key_blocks), varint(attempt)
        hit, predicted_ms = varint(chosen.hit_tokens), _DOUBLE(chosen.predicted_ttft_s * 1000)
        promise = b"".join((pieces.of_promise, _P_HIT, hit, _P_PREDICTED, predicted_ms))
        other = as_backup = b""
        if backup is not None:
            backup_pieces = self._pieces[backup.instance_id]
            other = _sized(_T_BACKUP, _promise(backup_pieces, backup))
            as_backup = backup_pieces.as_backup
        ticket = b"".join(
            (
                self._ticket_head,
                pieces.of_ticket,
                _T_LIFE,
                varint(agent_epoch),
                _T_SEQUENCE,
                varint(sequence),
                _T_ATTEMPT,
                tries,
                _sized(_T_CHOSEN, promise),
                other,
                _T_KEY,
                _FIXED64(decision.key),
                _T_KEY_BLOCKS,
                key_blocks,
                _T_TOKENS,
                varint(prompt_tokens),
                _sized(_T_TRACE, traceparent.encode()) if traceparent else b"",
                _T_REASON,
                reason,
            )
        )
        return b"".join(
            (
                _sized(_ID, request_id.encode()),
                pieces.as_instance,
                as_backup,
                _sized(_TICKET_OF, ticket),
                _REASON,
                reason,
                _PREDICTED,
                predicted_ms,
                _HIT,
                hit,
                _KEY_BLOCKS,
                key_blocks,
                self._epoch,
                _AGE,
                _DOUBLE(chosen.state_age_ms),
                _ATTEMPT,
                tries,
            )
        )


def streamed_answer(request_id: str, answer: bytes) -> bytes:
    """The RouteStreamResponse around an answer's bytes, which are neither read nor copied field by field."""
    return _sized(_S_ID, request_id.encode()) + _sized(_S_RESPONSE, answer)


def _promise(pieces: _Pieces, candidate: Candidate) -> bytes:
    return b"".join(
        (
            pieces.of_promise,
            _P_HIT,
            varint(candidate.hit_tokens),
            _P_PREDICTED,
            _DOUBLE(candidate.predicted_ttft_s * 1000),
        )
    )


def _sized(tag: bytes, content: bytes) -> bytes:
    return tag + varint(len(content)) + content
