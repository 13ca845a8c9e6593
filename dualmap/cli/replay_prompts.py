"""Prompts of a replayed trace: its own block ids, or token ids made up from them for engines that want a prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dualmap.client import Prompt
from dualmap.simulator.trace import TraceRequest

PromptForm = Literal["ids", "tokens"]

VOCABULARY = 32_000
"""Made-up token ids stay below it: every model has as many."""

_SPREAD = 2_654_435_761


def prompt_of(request: TraceRequest, form: PromptForm) -> Prompt:
    """The prompt in this form. Equal prefixes of the trace are equal prefixes of tokens, whichever run makes them."""
    if form == "ids":
        return Prompt.of_caller_ids(request.full_blocks, request.input_tokens, request.block_tokens)
    blocks = [_block(block_id, request.block_tokens) for block_id in request.full_blocks]
    tail_tokens = request.input_tokens - len(blocks) * request.block_tokens
    # The tail is nobody else's: caches hold whole blocks, and the trace says no more of it.
    blocks.append(_block(-1 - request.index, tail_tokens))
    return Prompt.of_tokens(np.concatenate(blocks).astype("<u4").tobytes())


def _block(seed: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    source = np.random.Philox(key=(seed * _SPREAD) % (1 << 64))
    return np.random.Generator(source).integers(VOCABULARY, size=tokens, dtype=np.uint32)
