"""Salts and LoRA adapters as learnt from the agent's own requests: what a block of an engine's event belongs to.

Events name them badly or not at all; a block whose extra keys match no request of ours is left out, never guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from dualmap.core.blocks import ChainKind, root_hash
from services.instanceagent.kv_wire import BlocksStored

PROBE_TOKENS = 16
"""Tokens of a prompt's beginning that tell requests apart; no engine block of a full page is shorter."""

MAX_SCOPES = 4_096
MAX_PROBES = 65_536
_PROBE_BYTES = 4 * PROBE_TOKENS


@dataclass(frozen=True, slots=True)
class Scope:
    """A LoRA adapter and a cache salt ("" each: none) with the root of their chains."""

    lora: str
    cache_salt: str
    root: int

    def __repr__(self) -> str:
        # A salt is a tenant's secret.
        return f"Scope(lora={self.lora!r}, salted={bool(self.cache_salt)})"

    def covers(self, leaves: tuple[str, ...]) -> bool:
        """Whether all extra keys of a block come from this adapter and salt, none from media or embeddings."""
        return all(
            leaf in (self.lora, self.cache_salt) or (bool(self.lora) and ("/" in leaf or leaf.startswith("#")))
            for leaf in leaves
        )


class Unmatched(Exception):
    """No scope, or more than one, fits a block; ``reason`` is fit for a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ScopeBook:
    """Scopes seen, and which of them began prompts with which tokens. Bounded: the longest unused go first."""

    def __init__(self, model: str, hash_key: bytes = b"") -> None:
        self._model = model
        self._hash_key = hash_key
        self.plain = self._make("", "")
        self._scopes: OrderedDict[tuple[str, str], Scope] = OrderedDict({("", ""): self.plain})
        self._probes: OrderedDict[int, dict[Scope, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scopes)

    def learn(self, lora: str, cache_salt: str, token_ids: bytes) -> Scope:
        """A request of ours goes to the engine; ``token_ids`` may be empty. O(1)."""
        names = (lora, cache_salt)
        scope = self._scopes.get(names)
        if scope is None:
            scope = self._scopes[names] = self._make(lora, cache_salt)
            if len(self._scopes) > MAX_SCOPES:
                oldest = next(key for key in self._scopes if key != ("", ""))
                del self._scopes[oldest]
        self._scopes.move_to_end(names)
        if len(token_ids) >= _PROBE_BYTES:
            probe = xxh3_64_intdigest(token_ids[:_PROBE_BYTES])
            self._probes.setdefault(probe, {})[scope] = None
            self._probes.move_to_end(probe)
            if len(self._probes) > MAX_PROBES:
                self._probes.popitem(last=False)
        return scope

    def of_root(self, stored: BlocksStored) -> Scope:
        """Scope of blocks that begin a prompt. Raises Unmatched."""
        leaves = stored.extra_keys[0] if stored.extra_keys else ()
        if stored.lora_id is None and not (stored.lora_name or stored.cache_salt or leaves):
            return self._unmarked(stored)
        if not (stored.lora_name or stored.cache_salt or leaves):
            return self._only([scope for scope in self._by_tokens(stored) if scope.lora], "extra_keys_unmatched")
        loras = [stored.lora_name] if stored.lora_name else ["", *leaves]
        salts = [stored.cache_salt] if stored.cache_salt else [*leaves, ""]
        for lora in loras:
            for salt in salts:
                scope = self._scopes.get((lora, salt))
                if scope is not None and scope.covers(leaves):
                    return scope
        raise Unmatched("extra_keys_unmatched")

    def _unmarked(self, stored: BlocksStored) -> Scope:
        """An event without any mark: from an engine that would have set it, or from one that never does."""
        if stored.self_describing:
            return self.plain
        return self._only(self._by_tokens(stored) or [self.plain], "scope_ambiguous")

    def _by_tokens(self, stored: BlocksStored) -> list[Scope]:
        if len(stored.token_ids) < _PROBE_BYTES:
            return []
        return list(self._probes.get(xxh3_64_intdigest(stored.token_ids[:_PROBE_BYTES]), ()))

    @staticmethod
    def _only(scopes: list[Scope], reason: str) -> Scope:
        if len(scopes) != 1:
            raise Unmatched("scope_ambiguous" if scopes else reason)
        return scopes[0]

    def _make(self, lora: str, cache_salt: str) -> Scope:
        return Scope(lora, cache_salt, root_hash(self._model, lora, cache_salt, ChainKind.TOKENS, self._hash_key))
