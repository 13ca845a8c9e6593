"""A small pool in memory for the decision tests: real rings, real views, nothing mocked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.choose import ChooseOptions, Decision, RingPicture, RouteQuery, choose
from dualmap.core.instance_view import InstanceView
from dualmap.core.keys import SplitTable
from dualmap.core.membership import InstanceState, Member, RingParameters, Split
from dualmap.core.ring import Ring
from dualmap.core.state import LoadReport

BLOCK = 128
NOW_MS = 1_000.0


def chain(*hashes: int, tail: int = 0, block_tokens: int = BLOCK) -> Chain:
    return Chain(ChainKind.TOKENS, list(hashes), block_tokens, max(1, len(hashes) * block_tokens + tail))


def run_of(first: int, blocks: int) -> list[int]:
    """A chain's hashes that no other run shares."""
    return [first * 1_000_003 + number for number in range(1, blocks + 1)]


class Pool:
    """n ACTIVE instances ``a0/0`` … with views heard just now."""

    def __init__(self, n: int, splits: Iterable[Split] = ()) -> None:
        self.parameters = RingParameters()
        self.members = [Member(f"a{i}/0", f"127.0.0.1:{1000 + i}", state=InstanceState.ACTIVE) for i in range(n)]
        ring = Ring.build(self.members, self.parameters)
        self.picture = RingPicture(ring, SplitTable.build(splits), self.parameters, epoch=1)
        self.views = {m.instance_id: InstanceView(m.instance_id, member=m, heard_at_ms=NOW_MS) for m in self.members}

    def pair(self, key: int) -> tuple[str, str]:
        first, second = self.picture.ring.pair(key, lambda _: True)
        assert first is not None
        assert second is not None
        return first, second

    def escapes(self, key: int) -> list[str]:
        """The instances that come next on each ring, in the order of looking."""
        seen = list(self.pair(key))
        for ring_no in (1, 2):
            seen.append(next(i for i in self.picture.ring.walk(ring_no, key) if i not in seen))
        return seen[2:]

    def warm(self, instance_id: str, hashes: Iterable[int]) -> None:
        for block in hashes:
            self.views[instance_id].kv.set(block, 1)

    def load(self, instance_id: str, **changes: object) -> None:
        view = self.views[instance_id]
        view.load = replace(view.load, **changes)  # type: ignore[arg-type]

    def busy(self, seconds: float, *instance_ids: str) -> None:
        for instance_id in instance_ids:
            self.load(instance_id, rest_s=seconds)

    def state(self, instance_id: str, state: InstanceState) -> None:
        view = self.views[instance_id]
        assert view.member is not None
        view.member = replace(view.member, state=state)

    def choose(
        self,
        hashes: Sequence[int],
        options: ChooseOptions | None = None,
        now_ms: float = NOW_MS,
        **query: object,
    ) -> Decision:
        request = RouteQuery("r", chain(*hashes), **query)  # type: ignore[arg-type]
        return choose(request, self.picture, self.views, options or ChooseOptions(), now_ms)


IDLE = LoadReport()
