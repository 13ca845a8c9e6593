"""What a policy is given and what it answers. It refuses to book or to move: the cluster does that alike for all."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from dualmap.core.blocks import Chain
from dualmap.core.choose import ChooseOptions, RingPicture, RouteQuery
from dualmap.core.engine_model import EngineEvent
from dualmap.core.instance_view import InstanceView
from dualmap.core.load import predict_ttft_s, priority_class, slack_bucket
from dualmap.core.state import QueuePolicy


@dataclass(slots=True)
class Sight:
    """What one router sees at one moment. ``pending_prompt_tokens``: per instance, as old as the views."""

    views: Mapping[str, InstanceView]
    picture: RingPicture
    choose: ChooseOptions
    random: random.Random
    now_s: float = 0.0
    pending_prompt_tokens: dict[str, float] = field(default_factory=dict)


class Look(NamedTuple):
    """One instance as a policy weighs it."""

    instance_id: str
    indexed_hit_tokens: int
    hit_tokens: int
    miss_tokens: int
    ahead_s: float
    prefill_s: float

    @property
    def predicted_s(self) -> float:
        """Predicted time to first token."""
        return self.ahead_s + self.prefill_s


class Placement(NamedTuple):
    """Where a request goes; ``backup`` may offer to take it, ``candidates`` are what a rebalancer may use."""

    chosen: Look
    backup: str = ""
    candidates: tuple[str, ...] = ()
    key: int = 0
    key_blocks: int = 0


class Policy(Protocol):
    """A routing policy. ``queue``: the order of the instances' queues as published; ``central``: no routing at all."""

    name: ClassVar[str]
    queue: ClassVar[QueuePolicy]
    late: ClassVar[bool]
    rebalances: ClassVar[bool]
    heat: ClassVar[bool]
    central: ClassVar[bool]

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """Decide. ``output_tokens`` is for policies that publish an oracle of it.

        Raises:
            NoInstance: nobody is eligible.
        """


@runtime_checkable
class Follower(Protocol):
    """A policy with a state of its own: it is told what engines did, and closed after its run."""

    def observe(self, instance_id: str, events: Iterable[EngineEvent]) -> None:
        """What one engine did, in order."""

    def close(self) -> None:
        """The run is over."""


def look(chain: Chain, view: InstanceView, slo_s: float) -> Look:
    """Hit and prediction of one instance, by core's one prediction."""
    indexed, hit = view.hit_tokens(chain)
    miss = max(0, chain.prompt_tokens - hit)
    load = view.load
    prefill_s = load.cost.seconds(miss, chain.prompt_tokens)
    booked = view.bookings.waiting_s if len(view.bookings) else None
    total = predict_ttft_s(load, booked, slack_bucket(slo_s, slo_s), priority_class(0), prefill_s)
    return Look(view.instance_id, indexed, hit, miss, total - prefill_s, prefill_s)


def eligible(sight: Sight, query: RouteQuery) -> list[InstanceView]:
    """Instances that may take new work, in the order of their ids."""
    return [
        view
        for instance_id in sight.picture.ring.instance_ids
        if (view := sight.views.get(instance_id)) is not None and view.eligible and instance_id not in query.exclude
    ]
