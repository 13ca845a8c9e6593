"""Prompts made up for engines that need one: as long as the trace says, and equal where it says equal."""

from __future__ import annotations

from dualmap.cli.replay_prompts import VOCABULARY, prompt_of
from dualmap.simulator.trace import TraceRequest


def request(index: int, tokens: int, ids: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(index, 0.0, tokens, 1, ids, 4)


def tokens_of(made: TraceRequest) -> bytes:
    token_ids = prompt_of(made, "tokens").token_ids
    assert token_ids is not None
    return token_ids


def test_equal_prefixes_are_equal_tokens_and_tails_are_not() -> None:
    """Whole blocks of one id are the same in every request, tails are nobody else's."""
    first = tokens_of(request(0, 10, (7, 8, 9)))
    second = tokens_of(request(1, 10, (7, 8, 9)))

    assert len(first) == len(second) == 10 * 4
    assert first[: 8 * 4] == second[: 8 * 4]
    assert first[8 * 4 :] != second[8 * 4 :]


def test_other_ids_are_other_tokens_within_every_vocabulary() -> None:
    """Two blocks that the trace tells apart stay apart."""
    prompt = tokens_of(request(0, 8, (1, 2)))
    ids = [int.from_bytes(prompt[at : at + 4], "little") for at in range(0, len(prompt), 4)]

    assert ids[:4] != ids[4:]
    assert max(ids) < VOCABULARY


def test_a_prompt_without_a_whole_block_is_its_tail() -> None:
    """Shorter than a block, and none at all of a trace without ids."""
    assert len(tokens_of(request(0, 3, (1,)))) == 12
    assert len(tokens_of(request(0, 9, ()))) == 36


def test_ids_go_as_they_are() -> None:
    """The trace's own ids, one for each whole block."""
    prompt = prompt_of(request(0, 10, (7, 8, 9)), "ids")

    assert (prompt.hashes, prompt.prompt_tokens, prompt.block_tokens, prompt.caller) == ((7, 8), 10, 4, True)
