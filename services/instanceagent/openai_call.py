"""One OpenAI request as it came over HTTP: checked where this agent must understand it, opaque beyond that."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.route_values import OpenAiBody, Prompt, Request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TICKET = "x-dualmap-ticket"
REQUEST_ID = "x-dualmap-request-id"
ATTEMPT = "x-dualmap-attempt"
INSTANCE = "x-dualmap-instance"
TTFT_SLO_MS = "x-dualmap-ttft-slo-ms"
PRIORITY = "x-dualmap-priority"
AGE_MS = "x-dualmap-age-ms"
TRACEPARENT = "traceparent"

HEADERS_FORWARDED = frozenset({"x-request-id", TRACEPARENT, "tracestate", "baggage"})
"""Headers that reach the engine; none of them is a credential."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names that requests may give: the pool's models, the first by default, and adapters of it."""

    models: tuple[str, ...]
    loras: tuple[str, ...] = ()

    def split(self, name: str) -> tuple[str, str]:
        """(model, LoRA adapter) of a name; an unknown one is a model, which the agent then refuses by name."""
        return (self.models[0], name) if name in self.loras else (name, "")


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """A request. ``ticket`` empty: it comes by the front door. ``fields`` is its body, read."""

    path: str
    body: bytes = field(repr=False)
    fields: Mapping[str, object] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    request_id: str
    attempt: int
    ticket: bytes = field(repr=False)
    instance_id: str
    traceparent: str
    ttft_slo_ms: int
    priority: int
    age_ms: int
    arrived_ms: float

    def traced(self, traceparent: str) -> OpenAiCall:
        """The same under a span of ours, which an engine that traces hears of too; itself where there is none."""
        if not traceparent:
            return self
        return replace(self, traceparent=traceparent, headers={**self.headers, TRACEPARENT: traceparent})

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path == CHAT

    @property
    def prompt_field(self) -> str:
        """Where its prompt stands."""
        return "messages" if self.chat else "prompt"

    @property
    def stream(self) -> bool:
        """Whether the answer is wanted as a stream."""
        return self.fields.get("stream") is True

    @property
    def model(self) -> str:
        """The model's or adapter's name; empty: the default."""
        return _text(self.fields, "model")

    def request(self, prompt: Prompt, names: ModelNames) -> Request:
        """As it is routed and submitted. Raises InvalidRequest."""
        model, lora = names.split(self.model)
        return Request(
            self.request_id,
            prompt,
            attempt=self.attempt,
            model=model,
            lora=lora,
            cache_salt=_text(self.fields, "cache_salt"),
            max_output_tokens=_limit(self.fields),
            ttft_slo_ms=self.ttft_slo_ms,
            priority=self.priority,
            age_ms=self.age_ms,
            openai=OpenAiBody(self.path, self.body, self.headers, self.stream),
        )


def read_call(path: str, body: bytes, headers: Mapping[str, str], arrived_ms: float, new_id: str) -> OpenAiCall:
    """Read one; ``headers`` by lower-case names, ``new_id`` for a request without id. Raises InvalidRequest."""
    fields = _object(body)
    ticket = _ticket(headers.get(TICKET, ""))
    return OpenAiCall(
        path=path,
        body=body,
        fields=fields,
        headers={name: headers[name] for name in HEADERS_FORWARDED if name in headers},
        request_id=headers.get(REQUEST_ID) or new_id,
        attempt=_number(headers, ATTEMPT, 0, 0),
        ticket=ticket,
        instance_id=headers.get(INSTANCE, ""),
        traceparent=headers.get(TRACEPARENT, ""),
        ttft_slo_ms=_number(headers, TTFT_SLO_MS, 0, 0),
        priority=_number(headers, PRIORITY, 0, -1),
        age_ms=_number(headers, AGE_MS, 0, 0),
        arrived_ms=arrived_ms,
    )


def _object(body: bytes) -> dict[str, object]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", "is no JSON") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return fields


def _ticket(header: str) -> bytes:
    try:
        return base64.b64decode(header, validate=True)
    except binascii.Error as error:
        raise InvalidRequest(TICKET, "must be base64, as the router's client gives it") from error


def _number(headers: Mapping[str, str], name: str, absent: int, least: int) -> int:
    text = headers.get(name)
    if text is None:
        return absent
    try:
        number = int(text)
    except ValueError as error:
        raise InvalidRequest(name, "must be a whole number") from error
    if not least <= number < 1 << 31:
        raise InvalidRequest(name, f"must be at least {least} and below 2^31")
    return number


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(name, "must be a text")
    return value


def _limit(fields: Mapping[str, object]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequest(name, "must be a whole number of at least 1")
        return min(value, MAX_OUTPUT_TOKENS)
    return 0


MAX_OUTPUT_TOKENS = 1_048_576
"""What the contract carries; an engine refuses far less."""
