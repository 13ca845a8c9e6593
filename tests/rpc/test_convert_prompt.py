"""Prompts to chains: equal tokens equal hashes, and every refusal names its field."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from dualmap.core.blocks import ChainKind, caller_chain, root_hash, text_chain, token_chain
from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingParameters
from dualmap.rpc.convert_prompt import MAX_BLOCKS, MAX_TOKENS, block_hashes_of, chain_of, chain_of_listed
from dualmap.rpc.wire import prompt_forms, sub_message
from dualmap.v1 import router_pb2
from dualmap.v1.types_pb2 import (
    CHAIN_KIND_BYTES,
    CHAIN_KIND_CALLER,
    CHAIN_KIND_TOKENS,
    BlockHashes,
    Prompt,
)
from dualmap.v1.types_pb2 import (
    ChainKind as WireKind,
)

PARAMETERS = RingParameters()


def chain(prompt: Prompt, **names: str) -> Any:
    return chain_of(
        prompt, names.get("model", "m"), names.get("lora", ""), names.get("salt", ""), PARAMETERS, b"key", "prompt"
    )


def tokens(count: int) -> bytes:
    return struct.pack(f"<{count}I", *range(count))


def test_token_ids_give_the_chain_of_their_full_blocks() -> None:
    """Token ids are hashed in full blocks of the ring's size, and the whole prompt is counted."""
    found = chain(Prompt(token_ids=tokens(300)))

    root = root_hash("m", "", "", ChainKind.TOKENS, b"key")
    assert list(found.hashes) == token_chain(root, tokens(300), 128)
    assert (found.kind, found.block_tokens, found.prompt_tokens, len(found.hashes)) == (ChainKind.TOKENS, 128, 300, 2)


def test_text_is_hashed_over_its_bytes_and_never_meets_tokens() -> None:
    """A text without tokenizer is taken as four bytes a token, in a kind of its own."""
    found = chain(Prompt(text="é" * 600))

    root = root_hash("m", "", "", ChainKind.BYTES, b"key")
    assert list(found.hashes) == text_chain(root, ("é" * 600).encode(), 128)
    assert (found.kind, found.prompt_tokens) == (ChainKind.BYTES, 300)


def test_hashes_of_our_protocol_are_taken_as_they_are() -> None:
    """A TOKENS chain made by the caller is the chain, whether it names the kind and the block or not."""
    for kind, block_tokens in ((0, 0), (CHAIN_KIND_TOKENS, 128)):
        message = BlockHashes(hashes=[7, 8], chain=kind, prompt_tokens=300, block_tokens=block_tokens)  # type: ignore[arg-type]

        found = chain(Prompt(block_hashes=message))

        assert (list(found.hashes), found.kind, found.prompt_tokens) == ([7, 8], ChainKind.TOKENS, 300)


def test_ids_of_a_caller_are_mixed_with_their_block_size() -> None:
    """A CALLER chain keeps its own block size and cannot meet another kind's hashes."""
    message = BlockHashes(hashes=[0, 1], chain=CHAIN_KIND_CALLER, prompt_tokens=1100, block_tokens=512)

    found = chain(Prompt(block_hashes=message))

    root = root_hash("m", "", "", ChainKind.CALLER, b"key")
    assert list(found.hashes) == caller_chain(root, [0, 1], 512)
    assert (found.kind, found.block_tokens, found.prompt_tokens) == (ChainKind.CALLER, 512, 1100)


def test_salt_lora_and_model_change_every_hash() -> None:
    """What isolates caches isolates hashes."""
    prompt = Prompt(token_ids=tokens(128))
    seen = {
        tuple(chain(prompt, **names).hashes)
        for names in ({}, {"model": "other"}, {"lora": "x"}, {"salt": "x"}, {"salt": "xx"})
    }
    assert len(seen) == 5


BAD = [
    (Prompt(), "prompt"),
    (Prompt(token_ids=b""), "prompt.token_ids"),
    (Prompt(token_ids=b"\1\2\3\4\5"), "prompt.token_ids"),
    (Prompt(token_ids=bytes(4 * MAX_TOKENS + 4)), "prompt.token_ids"),
    (Prompt(text=""), "prompt.text"),
    (Prompt(text="x" * (4 * MAX_TOKENS + 1)), "prompt.text"),
    (Prompt(block_hashes=BlockHashes(hashes=[1])), "prompt.block_hashes.prompt_tokens"),
    (Prompt(block_hashes=BlockHashes(hashes=[1, 2], prompt_tokens=255)), "prompt.block_hashes.prompt_tokens"),
    (Prompt(block_hashes=BlockHashes(prompt_tokens=4_000_000_000)), "prompt.block_hashes.prompt_tokens"),
    (
        Prompt(block_hashes=BlockHashes(hashes=[1] * (MAX_BLOCKS + 1), prompt_tokens=3_000_000)),
        "prompt.block_hashes.hashes",
    ),
    (
        Prompt(block_hashes=BlockHashes(hashes=[1], prompt_tokens=600, block_tokens=512)),
        "prompt.block_hashes.block_tokens",
    ),
    (
        Prompt(block_hashes=BlockHashes(hashes=[1], chain=CHAIN_KIND_CALLER, prompt_tokens=600)),
        "prompt.block_hashes.block_tokens",
    ),
    (
        Prompt(
            block_hashes=BlockHashes(hashes=[1], chain=CHAIN_KIND_CALLER, prompt_tokens=70_000, block_tokens=65_537)
        ),
        "prompt.block_hashes.block_tokens",
    ),
    (Prompt(block_hashes=BlockHashes(chain=CHAIN_KIND_BYTES, prompt_tokens=1)), "prompt.block_hashes.chain"),
    (Prompt(block_hashes=BlockHashes(chain=WireKind.ValueType(77), prompt_tokens=1)), "prompt.block_hashes.chain"),
]


@pytest.mark.parametrize(("prompt", "field"), BAD)
def test_a_malformed_prompt_is_refused_by_field(prompt: Prompt, field: str) -> None:
    """Whoever sent it learns which field to correct."""
    with pytest.raises(InvalidRequest) as refused:
        chain(prompt)

    assert refused.value.field == field


def test_a_short_prompt_has_no_block_but_counts() -> None:
    """Less than a block is a prompt like any other, with an empty chain."""
    assert (len(chain(Prompt(text="hi")).hashes), chain(Prompt(text="hi")).prompt_tokens) == (0, 1)
    assert len(chain(Prompt(block_hashes=BlockHashes(prompt_tokens=5))).hashes) == 0


def test_a_listed_chain_comes_back_as_it_was() -> None:
    """What agents list of waiting requests is read without hashing it again, whatever its kind."""
    message = BlockHashes(hashes=[0, 1], chain=CHAIN_KIND_CALLER, prompt_tokens=1100, block_tokens=512)
    made = chain(Prompt(block_hashes=message))

    listed = chain_of_listed(block_hashes_of(made))

    assert (list(listed.hashes), listed.kind, listed.block_tokens, listed.prompt_tokens) == (
        list(made.hashes),
        made.kind,
        made.block_tokens,
        made.prompt_tokens,
    )


def test_two_prompts_in_one_message_are_seen() -> None:
    """Generated code keeps the last form in silence; the bytes still show both."""
    one = router_pb2.RouteRequest(request_id="r", attempt=300, prompt=Prompt(text="hello"))
    two = one.SerializeToString() + router_pb2.RouteRequest(prompt=Prompt(token_ids=tokens(9))).SerializeToString()
    streamed = router_pb2.RouteStreamRequest(request=one).SerializeToString()

    assert prompt_forms(one.SerializeToString(), 6) == 1
    assert prompt_forms(two, 6) == 2
    assert prompt_forms(router_pb2.RouteRequest(request_id="r").SerializeToString(), 6) == 0
    assert prompt_forms(streamed, 1, 6) == 1
    assert sub_message(streamed, 1) == one.SerializeToString()


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 40, b"\x32\xff", b"\x0f\x01", b"2\x7f", b"\x31\x01", b"\x32\x02\x0b\x01"]
)
def test_bytes_that_are_no_message_hold_no_prompt(garbage: bytes) -> None:
    """Cut or foreign bytes end the look, they never raise."""
    assert prompt_forms(garbage, 6) == 0
