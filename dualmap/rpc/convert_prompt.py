"""Prompt message -> hash chain, every refusal naming its field. Keeps nothing of the prompt but hashes and counts."""

from __future__ import annotations

from functools import lru_cache

from dualmap.core.blocks import Chain, ChainKind, caller_chain, root_hash, text_chain, token_chain
from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingParameters
from dualmap.v1 import types_pb2

MAX_BLOCKS = 16_384
MAX_TOKENS = 1_048_576
MAX_BLOCK_TOKENS = 65_536
BYTES_PER_TOKEN = 4
"""A token id is a little-endian uint32; of a text without tokenizer, a token is taken as four bytes."""

_UNSPECIFIED = 0


def chain_of(  # noqa: PLR0917  (what a hash is made of)
    prompt: types_pb2.Prompt,
    model: str,
    lora: str,
    cache_salt: str,
    parameters: RingParameters,
    hash_key: bytes = b"",
    field: str = "prompt",
) -> Chain:
    """The chain of a prompt under the ring's parameters; ``field`` is how refusals name the message.

    Raises InvalidRequest. O(tokens) for token ids and text, O(blocks) for hashes.
    """
    form = prompt.WhichOneof("form")
    if form == "block_hashes":
        return _chain_of_hashes(prompt.block_hashes, model, lora, cache_salt, parameters, hash_key, field)
    if form == "token_ids":
        token_ids = prompt.token_ids
        _check_token_ids(token_ids, f"{field}.token_ids")
        root = _root(model, lora, cache_salt, ChainKind.TOKENS, hash_key)
        hashes = token_chain(root, token_ids, parameters.block_tokens)
        return Chain(ChainKind.TOKENS, hashes, parameters.block_tokens, len(token_ids) // BYTES_PER_TOKEN)
    if form == "text":
        utf8 = prompt.text.encode()
        _check_text(utf8, f"{field}.text")
        root = _root(model, lora, cache_salt, ChainKind.BYTES, hash_key)
        hashes = text_chain(root, utf8, parameters.block_tokens)
        return Chain(ChainKind.BYTES, hashes, parameters.block_tokens, -(-len(utf8) // BYTES_PER_TOKEN))
    raise InvalidRequest(field, "set exactly one of block_hashes, token_ids and text")


def block_hashes_of(chain: Chain) -> types_pb2.BlockHashes:
    """The message of a chain already in our hash space, as agents list what waits. Not for CALLER ids on the way in."""
    return types_pb2.BlockHashes(
        hashes=chain.hashes,
        chain=types_pb2.ChainKind.ValueType(int(chain.kind)),
        prompt_tokens=chain.prompt_tokens,
        block_tokens=chain.block_tokens,
    )


def chain_of_listed(message: types_pb2.BlockHashes, field: str = "blocks") -> Chain:
    """The inverse of ``block_hashes_of``: hashes between our own processes, as they are. Raises InvalidRequest."""
    kind = int(message.chain) or int(ChainKind.TOKENS)
    if kind not in _KINDS:
        raise InvalidRequest(f"{field}.chain", f"unknown chain kind {kind}")
    if not 1 <= message.block_tokens <= MAX_BLOCK_TOKENS:
        raise InvalidRequest(f"{field}.block_tokens", f"must be 1 to {MAX_BLOCK_TOKENS}")
    _check_counts(len(message.hashes), message.prompt_tokens, message.block_tokens, field)
    return Chain(ChainKind(kind), list(message.hashes), message.block_tokens, message.prompt_tokens)


_KINDS = frozenset(int(kind) for kind in ChainKind)


def _chain_of_hashes(  # noqa: PLR0917  (same)
    message: types_pb2.BlockHashes,
    model: str,
    lora: str,
    cache_salt: str,
    parameters: RingParameters,
    hash_key: bytes,
    field: str,
) -> Chain:
    kind, block_tokens = message.chain, message.block_tokens
    if kind in (_UNSPECIFIED, types_pb2.CHAIN_KIND_TOKENS):
        if block_tokens not in (0, parameters.block_tokens):
            problem = f"is {block_tokens}; the ring's is {parameters.block_tokens}: hash with it or leave it out"
            raise InvalidRequest(f"{field}.block_hashes.block_tokens", problem)
        _check_counts(len(message.hashes), message.prompt_tokens, parameters.block_tokens, field, ".block_hashes")
        return Chain(ChainKind.TOKENS, message.hashes[:], parameters.block_tokens, message.prompt_tokens)
    if kind == types_pb2.CHAIN_KIND_CALLER:
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise InvalidRequest(
                f"{field}.block_hashes.block_tokens", f"must be 1 to {MAX_BLOCK_TOKENS} for a CALLER chain"
            )
        _check_counts(len(message.hashes), message.prompt_tokens, block_tokens, field, ".block_hashes")
        root = _root(model, lora, cache_salt, ChainKind.CALLER, hash_key)
        hashes = caller_chain(root, message.hashes, block_tokens)
        return Chain(ChainKind.CALLER, hashes, block_tokens, message.prompt_tokens)
    raise InvalidRequest(f"{field}.block_hashes.chain", f"must be TOKENS or CALLER, is {int(kind)}")


def _check_counts(blocks: int, prompt_tokens: int, block_tokens: int, field: str, form: str = "") -> None:
    if blocks > MAX_BLOCKS:
        raise InvalidRequest(f"{field}{form}.hashes", f"at most {MAX_BLOCKS}, got {blocks}")
    if prompt_tokens < 1:
        raise InvalidRequest(f"{field}{form}.prompt_tokens", "is required: the tokens of the whole prompt")
    if prompt_tokens // block_tokens > MAX_BLOCKS:
        raise InvalidRequest(f"{field}{form}.prompt_tokens", f"at most {MAX_BLOCKS} blocks of {block_tokens} tokens")
    if blocks * block_tokens > prompt_tokens:
        problem = f"is {prompt_tokens}, fewer than {blocks} full blocks of {block_tokens} tokens hold"
        raise InvalidRequest(f"{field}{form}.prompt_tokens", problem)


def _check_token_ids(token_ids: bytes, field: str) -> None:
    if not token_ids:
        raise InvalidRequest(field, "is empty")
    if len(token_ids) % BYTES_PER_TOKEN:
        raise InvalidRequest(field, f"must be little-endian uint32; {len(token_ids)} bytes are not a multiple of 4")
    if len(token_ids) > MAX_TOKENS * BYTES_PER_TOKEN:
        raise InvalidRequest(field, f"at most {MAX_TOKENS} tokens, got {len(token_ids) // BYTES_PER_TOKEN}")


def _check_text(utf8: bytes, field: str) -> None:
    if not utf8:
        raise InvalidRequest(field, "is empty")
    if len(utf8) > MAX_TOKENS * BYTES_PER_TOKEN:
        raise InvalidRequest(field, f"at most {MAX_TOKENS * BYTES_PER_TOKEN} bytes of UTF-8, got {len(utf8)}")


@lru_cache(maxsize=1024)
def _root(model: str, lora: str, cache_salt: str, kind: ChainKind, hash_key: bytes) -> int:
    return root_hash(model, lora, cache_salt, kind, hash_key)
