"""Offers and pulls of late binding <-> values; every refusal names its field. Decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualmap.core.blocks import Chain
from dualmap.core.errors import InvalidRequest
from dualmap.rpc.convert_prompt import block_hashes_of, chain_of_listed
from dualmap.v1 import agent_pb2

MAX_OFFERS = 1_024
"""Entries of one message."""

MAX_OFFER_BLOCKS = 1_024
"""A longer chain is not sent: the offer stays light, and the holder's own count of the miss stands."""


@dataclass(frozen=True, slots=True)
class OfferItem:
    """A request that waits at its holder and could run at the target; times in milliseconds from now."""

    request_id: str
    attempt: int
    deadline_ms: float
    age_ms: float
    priority: int
    prompt_tokens: int
    miss_tokens: int
    holder_miss_tokens: int
    version: int
    chain: Chain | None


@dataclass(frozen=True, slots=True)
class OfferBatch:
    """New and changed offers of one holder to one target, and those that no longer stand."""

    holder_instance_id: str
    target_instance_id: str
    offers: tuple[OfferItem, ...]
    withdrawn: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """A target with room asks a holder for a request."""

    holder_instance_id: str
    target_instance_id: str
    request_id: str
    attempt: int


def offer_message(batch: OfferBatch) -> agent_pb2.OfferRequest:
    """The message of a batch."""
    return agent_pb2.OfferRequest(
        holder_instance_id=batch.holder_instance_id,
        target_instance_id=batch.target_instance_id,
        offers=[_entry(item) for item in batch.offers],
        withdrawn_request_ids=batch.withdrawn,
    )


def offer_of(message: agent_pb2.OfferRequest) -> OfferBatch:
    """A batch. Raises InvalidRequest."""
    _require(message, "holder_instance_id", "target_instance_id")
    for name, entries in (("offers", message.offers), ("withdrawn_request_ids", message.withdrawn_request_ids)):
        if len(entries) > MAX_OFFERS:
            raise InvalidRequest(name, f"at most {MAX_OFFERS}, got {len(entries)}")
    return OfferBatch(
        holder_instance_id=message.holder_instance_id,
        target_instance_id=message.target_instance_id,
        offers=tuple(_item(entry, f"offers[{index}]") for index, entry in enumerate(message.offers)),
        withdrawn=tuple(message.withdrawn_request_ids),
    )


def pull_message(order: PullOrder) -> agent_pb2.PullRequest:
    """The message of a pull."""
    return agent_pb2.PullRequest(
        holder_instance_id=order.holder_instance_id,
        target_instance_id=order.target_instance_id,
        request_id=order.request_id,
        attempt=order.attempt,
    )


def pull_of(message: agent_pb2.PullRequest) -> PullOrder:
    """A pull. Raises InvalidRequest."""
    _require(message, "holder_instance_id", "target_instance_id", "request_id")
    return PullOrder(message.holder_instance_id, message.target_instance_id, message.request_id, message.attempt or 1)


def _entry(item: OfferItem) -> agent_pb2.OfferEntry:
    blocks = None
    if item.chain is not None and item.chain.blocks <= MAX_OFFER_BLOCKS:
        blocks = block_hashes_of(item.chain)
    return agent_pb2.OfferEntry(
        request_id=item.request_id,
        attempt=item.attempt,
        deadline_ms=item.deadline_ms,
        prompt_tokens=item.prompt_tokens,
        miss_tokens=item.miss_tokens,
        holder_miss_tokens=item.holder_miss_tokens,
        version=item.version,
        priority=item.priority,
        blocks=blocks,
        age_ms=item.age_ms,
    )


def _item(entry: agent_pb2.OfferEntry, field: str) -> OfferItem:
    if not entry.request_id:
        raise InvalidRequest(f"{field}.request_id", "is required")
    for name in ("deadline_ms", "age_ms"):
        if not math.isfinite(getattr(entry, name)):
            raise InvalidRequest(f"{field}.{name}", "must be a number")
    if not -1 <= entry.priority <= 1:
        raise InvalidRequest(f"{field}.priority", "must be -1, 0 or 1")
    return OfferItem(
        request_id=entry.request_id,
        attempt=entry.attempt or 1,
        deadline_ms=entry.deadline_ms,
        age_ms=max(0.0, entry.age_ms),
        priority=entry.priority,
        prompt_tokens=entry.prompt_tokens,
        miss_tokens=entry.miss_tokens,
        holder_miss_tokens=entry.holder_miss_tokens,
        version=entry.version,
        chain=chain_of_listed(entry.blocks, f"{field}.blocks") if entry.HasField("blocks") else None,
    )


def _require(message: agent_pb2.OfferRequest | agent_pb2.PullRequest, *names: str) -> None:
    for name in names:
        if not getattr(message, name):
            raise InvalidRequest(name, "is required")
