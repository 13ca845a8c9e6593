"""Decides and books one request at a time under one lock, which the follower shares; knows no message and no transport.

No I/O, no log and no Redis call is made here: a decision costs some ten microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn

from dualmap.core.choose import ChooseOptions, Decision, RingPicture, RouteQuery, book, choose
from dualmap.core.errors import AbortedAttempt, AlreadyExists, NoInstance, NotFound, Overloaded, Unavailable
from dualmap.core.instance_view import InstanceView
from dualmap.core.membership import RingSnapshot
from dualmap.rpc.convert_explain import Explained, InstanceFacts, ViewFacts
from dualmap.rpc.convert_route import RouteCall, RouteRules
from dualmap.rpc.route_answer import AnswerWriter
from dualmap.view.cluster_view import ClusterView
from services.router.answers import Answer, Answers
from services.router.heat_sampler import HeatSampler
from services.router.history import Decided, History
from services.router.metrics import RouterMetrics

MIN_RETRY_MS = 50
MAX_RETRY_MS = 10_000
RETRY_SPREAD = 0.2
"""Retries come back within ± 20 % of the delay, not all at once."""

NOT_READY_RETRY_MS = 500
_TOLD_ALIKE = 16
_ROUTE_MS = 0.25
"""A decision with its call, of the one interpreter's time, rather more than less."""


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """What one life of a router is: ``router_id`` is random at each start."""

    router_id: int
    pool: str
    models: tuple[str, ...]
    hash_key: bytes
    options: ChooseOptions


@dataclass(frozen=True, slots=True)
class Scene:
    """What is computed once a ring, not once a request."""

    ring: RingSnapshot
    rules: RouteRules
    writer: AnswerWriter


class Decider:
    """The router's one place of decisions; safe from any thread."""

    def __init__(
        self,
        view: ClusterView,
        facts: RouterFacts,
        metrics: RouterMetrics,
        sampler: HeatSampler,
        draw: Callable[[], float],
    ) -> None:
        """``draw`` gives numbers in 0 to 1, for the spread of retry delays."""
        self.facts = facts
        self._view = view
        self._lock = view.lock
        self._clock_ms = view.clock_ms
        self._metrics = metrics
        self._sampler = sampler
        self._draw = draw
        self._answers = Answers()
        self._history = History()
        self._scene: Scene | None = None
        self._told: tuple[int, Overloaded | None] = 0, None

    def scene(self) -> Scene:
        """What requests are read with now. Raises Unavailable before the first ring."""
        ring = self._view.ring
        scene = self._scene
        if scene is not None and scene.ring is ring:
            return scene
        if ring is None:
            self._refuse_unready()
        facts = self.facts
        rules = RouteRules(facts.models, ring.parameters, ring.default_ttft_slo_ms / 1000, facts.hash_key)
        digest = ring.parameters.digest()
        writer = AnswerWriter(facts.router_id, facts.pool, ring.epoch, digest, ring.members)
        scene = Scene(ring, rules, writer)
        self._scene = scene
        return scene

    def route(self, read: Callable[[RouteRules], RouteCall], traceparent: str = "") -> tuple[bytes, Decision | None]:
        """The serialised answer, and the decision when it was made now.

        ``read`` makes the checked request under a ring's rules; it is asked again when the ring changed meanwhile.
        Raises what the contract lists: InvalidRequest, UnknownModel, AbortedAttempt, AlreadyExists, Overloaded,
        NoInstance, Unavailable.
        """
        while True:
            scene = self.scene()
            call = read(scene.rules)
            began_s = perf_counter()
            with self._lock:
                if self._view.ring is not scene.ring:
                    continue
                now_ms = self._clock_ms()
                known = self._known(call, now_ms)
                answer = (known.raw, None) if known is not None else self._decide(call, scene, traceparent, now_ms)
                self._metrics.decision_s.observe(perf_counter() - began_s)
            return answer

    def what_if(self, call: RouteCall) -> Explained:
        """How the request would go; nothing is booked. Raises NoInstance, Overloaded, Unavailable."""
        with self._lock:
            decision = self._choose(call.query, self._picture(), self._clock_ms())
            epoch = self._picture().epoch
        slo_s = call.query.ttft_slo_s or 0.0
        tokens = call.query.chain.prompt_tokens
        return Explained("", call.attempt, decision, tokens, slo_s, epoch, 0.0, self.facts.router_id)

    def explain(self, request_id: str) -> Explained:
        """Why a recent request went where it went. Raises NotFound."""
        with self._lock:
            decided = self._history.find(request_id)
            now_ms = self._clock_ms()
        if decided is None:
            raise NotFound("recent request", request_id)
        return Explained(
            request_id,
            decided.attempt,
            decided.decision,
            decided.prompt_tokens,
            decided.ttft_slo_s,
            decided.ring_epoch,
            now_ms - decided.at_ms,
            self.facts.router_id,
        )

    def release(self, request_id: str, attempt: int) -> tuple[bool, int]:
        """Give a booking back: whether there was one, and the ring epoch."""
        with self._lock:
            answer = self._answers.find(request_id, attempt, self._clock_ms())
            released = answer is not None and answer.release()
            self._metrics.count("released", released)
            ring = self._view.ring
        return released, ring.epoch if ring is not None else 0

    def view_facts(self, instance_ids: Sequence[str]) -> ViewFacts:
        """What is known of these instances, of all when none is named."""
        with self._lock:
            now_ms = self._clock_ms()
            ring = self._view.ring
            wanted = instance_ids or tuple(self._view.instances)
            found = [self._view.instances[name] for name in wanted if name in self._view.instances]
            instances = tuple(_instance_facts(instance, now_ms) for instance in found)
            degraded = self._view.degraded
        return ViewFacts(
            router_id=self.facts.router_id,
            ring_epoch=ring.epoch if ring is not None else 0,
            parameters_digest=ring.parameters.digest() if ring is not None else 0,
            instances=instances,
            degraded=degraded,
            splits=len(ring.splits) if ring is not None else 0,
        )

    def expire(self) -> None:
        """Drop overdue bookings and answers, series of the departed; the lock is held for one instance at a time."""
        for instance in tuple(self._view.instances.values()):
            with self._lock:
                expired = instance.bookings.expire(self._clock_ms(), instance.booking_ttl_ms)
                self._metrics.count("expired", expired)
        more = True
        while more:
            with self._lock:
                more = self._answers.forget(self._clock_ms(), most=256) == 256
        with self._lock:
            self._metrics.counts["answers_overflowed"] = self._answers.overflowed
            self._metrics.forget_departed(self._view.instances, self._clock_ms())

    def overloaded(self, waiting: int) -> Overloaded:
        """The refusal of a call that may not wait: the delay is the time the waiting ones take.

        A few are told the same: they come back as far apart as they came, and refusing must cost little.
        """
        self._metrics.count("shed")
        told, refusal = self._told
        if refusal is None or told >= _TOLD_ALIKE:
            told, refusal = (
                0,
                Overloaded(self._spread(_ROUTE_MS * (waiting + 1)), f"{waiting} calls wait at this router"),
            )
        self._told = told + 1, refusal
        return refusal

    def _picture(self) -> RingPicture:
        picture = self._view.picture
        if picture is None:
            self._refuse_unready()
        return picture

    def _refuse_unready(self) -> NoReturn:
        self._metrics.count("not_ready")
        raise Unavailable("the ring", self._spread(NOT_READY_RETRY_MS))

    def _known(self, call: RouteCall, now_ms: float) -> Answer | None:
        """The answer already given for this identity. Raises AlreadyExists, AbortedAttempt."""
        request_id, attempt = call.query.request_id, call.attempt
        newest = self._answers.newest(request_id, now_ms)
        if newest is None:
            return None
        known = self._answers.find(request_id, attempt, now_ms)
        if known is None:
            if newest.attempt > attempt:
                self._metrics.count("aborted")
                raise AbortedAttempt(request_id, newest.attempt, "was routed before this lower one came")
            self._metrics.count("superseded", newest.release())
            return None
        if known.digest != call.digest:
            self._metrics.count("conflicting")
            raise AlreadyExists(request_id, attempt, "was routed with other content")
        instance = self._view.instances.get(known.instance_id)
        if instance is None or not instance.eligible:
            self._metrics.count("aborted")
            raise AbortedAttempt(request_id, attempt, f"went to {known.instance_id}, which takes no new work now")
        self._metrics.count("repeated")
        return known

    def _decide(self, call: RouteCall, scene: Scene, traceparent: str, now_ms: float) -> tuple[bytes, Decision]:
        query, attempt, digest = call
        request_id, chain = query.request_id, query.chain
        picture = self._picture()
        decision = self._choose(query, picture, now_ms)
        chosen = decision.chosen
        instance = self._view.instances[chosen.instance_id]
        sequence = book(decision, instance, query, now_ms)
        tokens = chain.prompt_tokens
        raw = scene.writer.write(request_id, attempt, decision, tokens, instance.agent_epoch, sequence, traceparent)
        self._answers.add(
            Answer(request_id, attempt, digest, chosen.instance_id, instance.bookings, sequence, raw, now_ms)
        )
        slo_s = query.ttft_slo_s or picture.default_slo_s
        self._history.add(Decided(request_id, attempt, decision, tokens, slo_s, picture.epoch, now_ms))
        self._sampler.observe(chain.hashes, decision.key_blocks, chosen.miss_tokens)
        self._metrics.routed(decision, tokens)
        return raw, decision

    def _choose(self, query: RouteQuery, picture: RingPicture, now_ms: float) -> Decision:
        try:
            return choose(query, picture, self._view.instances, self.facts.options, now_ms)
        except NoInstance as error:
            self._metrics.count("no_instance")
            raise NoInstance(self._spread(error.retry_after_ms or NOT_READY_RETRY_MS)) from None
        except Overloaded as error:
            self._metrics.count("overloaded")
            raise Overloaded(self._spread(error.retry_after_ms or MIN_RETRY_MS), error.what) from None

    def _spread(self, delay_ms: float) -> int:
        bounded = min(MAX_RETRY_MS, max(MIN_RETRY_MS, delay_ms))
        return round(bounded * (1 + RETRY_SPREAD * (2 * self._draw() - 1)))


def _instance_facts(instance: InstanceView, now_ms: float) -> InstanceFacts:
    member = instance.member
    return InstanceFacts(
        instance_id=instance.instance_id,
        state=int(member.state) if member is not None else 0,
        incarnation=instance.incarnation,
        agent_epoch=instance.agent_epoch,
        version=instance.version,
        kv_blocks=len(instance.kv),
        kv_digest=instance.kv.digest,
        state_age_ms=instance.age_ms(now_ms),
        reachable=instance.reachable,
        bookings=len(instance.bookings),
        booked_s=instance.bookings.booked_s,
        kv_bytes=instance.kv.nbytes,
    )
