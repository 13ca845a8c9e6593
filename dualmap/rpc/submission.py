"""A submitted request as an agent keeps it: checked values beside the message itself, which a hand-over sends on."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.core.blocks import Chain
from dualmap.rpc.request_events import HandoverCause
from dualmap.rpc.route_values import OpenAiBody
from dualmap.v1 import agent_pb2


@dataclass(frozen=True, slots=True)
class PromisedCandidate:
    """What the router promised of one candidate of the pair."""

    instance_id: str
    hit_tokens: int
    predicted_ttft_ms: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """The router's hint: validated, never an authority."""

    router_id: int
    instance_id: str
    agent_epoch: int
    sequence: int
    parameters_digest: int
    chosen: PromisedCandidate | None
    backup: PromisedCandidate | None
    key: int
    traceparent: str

    @property
    def candidate_ids(self) -> tuple[str, ...]:
        """The pair, the chosen first."""
        return tuple(promise.instance_id for promise in (self.chosen, self.backup) if promise is not None)


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt of a request. The prompt stays in ``message`` and is shown to the engine only."""

    request_id: str
    attempt: int
    chain: Chain
    message: agent_pb2.SubmitRequest
    model: str
    max_output_tokens: int
    ttft_slo_ms: int
    priority: int
    instance_id: str
    ticket: Ticket | None
    age_ms: float = 0.0

    @property
    def token_ids(self) -> bytes:
        """Token ids, little-endian uint32; empty where the prompt came in another form."""
        return self.message.prompt.token_ids

    @property
    def text(self) -> str:
        """The prompt's text; empty where it came in another form."""
        return self.message.prompt.text

    @property
    def openai(self) -> OpenAiBody | None:
        """The HTTP request it came by; None: it came by gRPC, prompt alone."""
        if not self.message.HasField("openai"):
            return None
        openai = self.message.openai
        return OpenAiBody(openai.path, openai.body, dict(openai.headers), openai.stream)

    def __repr__(self) -> str:
        # The prompt must reach no log, and a repr is how things reach logs.
        return f"Submission({self.request_id!r}, attempt={self.attempt}, prompt_tokens={self.chain.prompt_tokens})"


@dataclass(frozen=True, slots=True)
class Handover:
    """What comes with a request that another agent hands over; times in milliseconds, left and past, never absolute."""

    target_instance_id: str
    origin_instance_id: str
    number: int
    deadline_left_ms: float
    age_ms: float
    cause: HandoverCause
    traceparent: str
