"""Requests as the simulator follows them: the trace's, with their chain hashed once, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualmap.core.blocks import Chain, ChainKind, caller_chain, root_hash
from dualmap.simulator.trace import TraceRequest

MODEL = "simulated"


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request and its fate. Times are virtual seconds; None: it never came to that."""

    index: int
    request_id: str
    arrival_s: float
    deadline_s: float
    chain: Chain
    output_tokens: int
    session: str = ""
    instance: str = ""
    backup: str = ""
    candidates: tuple[str, ...] = ()
    key: int = 0
    attempt: int = 1
    router: int = 0
    sequence: int = 0
    predicted_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    hit_tokens: int = 0
    moved_s: float | None = None
    moves: int = 0
    pulls: int = 0
    failed: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.chain.prompt_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None when none came."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def in_time(self) -> bool:
        """Whether the first token came within the objective."""
        return self.first_token_s is not None and not self.failed and self.first_token_s <= self.deadline_s


def chains_of(requests: Sequence[TraceRequest]) -> list[Chain]:
    """The chains of a trace, hashed as a router would: caller's ids, whole blocks only."""
    root = root_hash(MODEL, kind=ChainKind.CALLER)
    known: dict[tuple[int, int], int] = {}
    chains = []
    for request in requests:
        tokens = request.block_tokens
        hashes = []
        for block in request.full_blocks:
            mixed = known.get((tokens, block))
            if mixed is None:
                mixed = known[tokens, block] = caller_chain(root, (block,), tokens)[0]
            hashes.append(mixed)
        chains.append(Chain(ChainKind.CALLER, tuple(hashes), tokens, request.input_tokens))
    return chains


def sim_requests(requests: Sequence[TraceRequest], chains: Sequence[Chain], ttft_slo_s: float) -> list[SimRequest]:
    """Fresh requests for one run."""
    return [
        SimRequest(
            index=place,
            request_id=f"r{place}",
            arrival_s=request.timestamp_s,
            deadline_s=request.timestamp_s + ttft_slo_s,
            chain=chain,
            output_tokens=request.output_tokens,
            session=request.session,
        )
        for place, (request, chain) in enumerate(zip(requests, chains, strict=True))
    ]
