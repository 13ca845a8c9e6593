"""What a client says and hears, as values: requests, routes, events. No transport, no generated message."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in exactly one form; make it with ``of_tokens``, ``of_text``, ``of_hashes`` or ``of_caller_ids``."""

    token_ids: bytes | None = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)
    hashes: tuple[int, ...] | None = field(default=None, repr=False)
    caller: bool = False
    prompt_tokens: int = 0
    block_tokens: int = 0

    @classmethod
    def of_tokens(cls, token_ids: bytes | Iterable[int]) -> Self:
        """From token ids: numbers, or bytes of little-endian uint32."""
        if isinstance(token_ids, bytes):
            return cls(token_ids=token_ids)
        ids = tuple(token_ids)
        return cls(token_ids=struct.pack(f"<{len(ids)}I", *ids))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """From plain text, hashed over its UTF-8 bytes: for want of a tokenizer only."""
        return cls(text=text)

    @classmethod
    def of_hashes(cls, hashes: Iterable[int], prompt_tokens: int, block_tokens: int = 0) -> Self:
        """From hashes made as the protocol says; ``block_tokens`` 0 is the ring's."""
        return cls(hashes=tuple(hashes), prompt_tokens=prompt_tokens, block_tokens=block_tokens)

    @classmethod
    def of_caller_ids(cls, ids: Iterable[int], prompt_tokens: int, block_tokens: int) -> Self:
        """From the caller's own cumulative prefix ids, one for each full block of ``block_tokens``."""
        return cls(hashes=tuple(ids), caller=True, prompt_tokens=prompt_tokens, block_tokens=block_tokens)


@dataclass(frozen=True, slots=True)
class OpenAiBody:
    """An OpenAI HTTP request as it came, for engines that speak HTTP."""

    path: str
    body: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """A request to be placed and run. ``attempt`` counts from 1; a limit or SLO of 0 is the engine's or the pool's.

    ``age_ms``: how long ago its caller first asked for it, at an earlier attempt; its deadline counts from then.
    """

    request_id: str
    prompt: Prompt
    attempt: int = 1
    model: str = ""
    lora: str = ""
    cache_salt: str = field(default="", repr=False)
    max_output_tokens: int = 0
    ttft_slo_ms: int = 0
    priority: int = 0
    exclude: tuple[str, ...] = ()
    openai: OpenAiBody | None = None
    age_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach an instance; ``http_address`` is empty where its agent has no HTTP port."""

    instance_id: str
    grpc_address: str
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``ticket`` is opaque, for the agent as it is; a negative ``state_age_ms`` means never."""

    request_id: str
    attempt: int
    instance: Address
    backup: Address | None
    ticket: bytes = field(repr=False)
    reason: str
    predicted_ttft_ms: float
    hit_tokens: int
    key_blocks: int
    ring_epoch: int
    state_age_ms: float
    traceparent: str = ""

    @property
    def ticket_header(self) -> str:
        """The ticket as an HTTP header's value: base64."""
        return base64.b64encode(self.ticket).decode("ascii")


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits at an instance, ``position`` requests before it."""

    instance_id: str
    position: int
    predicted_ttft_ms: float


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has the request; ``waited_ms`` is since its submission, at all holders."""

    instance_id: str
    waited_ms: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is out; ``ttft_ms`` is since the submission, at all holders."""

    instance_id: str
    ttft_ms: float
    hit_tokens: int
    prompt_tokens: int
    prefill_ms: float
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """More tokens, batched; ``data`` is text where the engine gives one."""

    count: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a request; times in milliseconds since its submission, at all holders."""

    instance_id: str
    output_tokens: int
    total_ms: float
    ttft_ms: float
    waited_ms: float
    hit_tokens: int
    prompt_tokens: int
    handovers: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life, where nothing else is sent."""


@dataclass(frozen=True, slots=True)
class HttpChunk:
    """Part of the engine's HTTP answer; ``status`` and ``headers`` come with the first part only."""

    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)


Event = Queued | Started | FirstToken | Tokens | Done | Pulse | HttpChunk
"""One event of a request's life."""
