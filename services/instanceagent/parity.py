"""Self-test of an engine at registration: send a prompt, see our blocks of it appear. It decides nothing."""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dualmap.core.blocks import token_chain
from services.instanceagent.answer_stream import usage_of
from services.instanceagent.engine_http import EngineCallFailed

BLOCKS = 2
"""Routing blocks of the prompt: the second shows that chains go on as ours do."""

_TRIES = 6
_WORDS_A_BLOCK = 32


@dataclass(frozen=True, slots=True)
class ParityProbe:
    """What the test needs of an adapter. ``root``: of plain chains. ``seen`` gives the tier of a hash, 0 for none."""

    tokenize: Callable[[str], Awaitable[bytes]]
    complete: Callable[[list[int]], Awaitable[dict[str, object]]]
    batches: Callable[[], int]
    seen: Callable[[int], int]
    heard: asyncio.Event
    root: int
    block_tokens: int


async def parity_failure(probe: ParityProbe, timeout_s: float) -> str | None:
    """None when the blocks appeared, else: tokenize_failed, request_failed, tokens_changed, no_events or mismatch."""
    try:
        async with asyncio.timeout(timeout_s):
            token_ids = await _prompt(probe)
    except (EngineCallFailed, TimeoutError):
        return "tokenize_failed"
    if token_ids is None:
        return "tokenize_failed"
    batches_before = probe.batches()
    ids = list(struct.unpack(f"<{len(token_ids) // 4}I", token_ids))
    try:
        async with asyncio.timeout(timeout_s):
            answer = await probe.complete(ids)
    except (EngineCallFailed, TimeoutError):
        return "request_failed"
    usage = usage_of(answer)
    if usage is not None and usage.prompt_tokens != len(ids):
        return "tokens_changed"
    expected = token_chain(probe.root, token_ids, probe.block_tokens)
    try:
        async with asyncio.timeout(timeout_s):
            while not all(probe.seen(block) for block in expected):
                probe.heard.clear()
                await probe.heard.wait()
    except TimeoutError:
        return "no_events" if probe.batches() == batches_before else "mismatch"
    return None


async def _prompt(probe: ParityProbe) -> bytes | None:
    """Token ids of a text that no cache holds, one more than the blocks take."""
    wanted = 4 * (BLOCKS * probe.block_tokens + 1)
    nonce = uuid.uuid4().hex
    words = BLOCKS * _WORDS_A_BLOCK
    for _ in range(_TRIES):
        words *= 2
        token_ids = await probe.tokenize(f"{nonce} " + " ".join(f"parity {number}" for number in range(words)))
        if len(token_ids) >= wanted:
            return token_ids[:wanted]
    return None
