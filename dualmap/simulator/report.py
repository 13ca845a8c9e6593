"""Measures of a run (algorithm.md section 5), as plain values for tables, plots and JSON.

Effective request capacity counts failed and shed requests as misses; the first ``warmup`` requests are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dualmap.simulator.cluster import RunResult
from dualmap.simulator.requests import SimRequest

QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Measures:
    """One run. Seconds and shares; ``fair_attainment`` is the least of the prompt-length quartiles'."""

    requests: int
    attainment: float
    fair_attainment: float
    attainment_by_quartile: tuple[float, ...]
    hit_rate: float
    load_cv: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    missed_wait_p99_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    failed: int
    moved: int
    pulled: int
    prediction_error_p50_s: float
    prediction_error_p90_s: float
    key_depths: dict[int, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Measures:
        """From what `as_dict` gave, through JSON or not."""
        depths = {int(depth): share for depth, share in value["key_depths"].items()}
        parts = tuple(value["attainment_by_quartile"])
        return cls(**{**value, "key_depths": depths, "attainment_by_quartile": parts})


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; NaN of none."""
    if not values:
        return math.nan
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]


def quartiles(requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    """The requests by length of prompt in four equal parts, shortest first; ties by order of arrival."""
    ordered = sorted(requests, key=lambda request: (request.prompt_tokens, request.index))
    size = len(ordered)
    return [ordered[size * part // QUARTILES : size * (part + 1) // QUARTILES] for part in range(QUARTILES)]


def attained(requests: Sequence[SimRequest]) -> float:
    """Share of the requests whose first token came in time; 1 of none."""
    return sum(request.in_time for request in requests) / len(requests) if requests else 1.0


def measure(result: RunResult, warmup: int) -> Measures:
    """Measures of a run without its first ``warmup`` requests."""
    counted = result.requests[warmup:]
    parts = [attained(part) for part in quartiles(counted)]
    ttft: list[float] = sorted(r.ttft_s for r in counted if r.ttft_s is not None and not r.failed)
    missed = sorted(r.ttft_s for r in counted if r.ttft_s is not None and not r.in_time)
    done = [r for r in counted if r.done_s is not None and r.first_token_s is not None and not r.failed]
    e2e = sorted((r.done_s or 0.0) - r.arrival_s for r in done)
    tpot = sorted(
        ((r.done_s or 0.0) - (r.first_token_s or 0.0)) / (r.output_tokens - 1) for r in done if r.output_tokens > 1
    )
    answered = [(r.ttft_s, r.predicted_s) for r in counted]
    errors = sorted(abs(ttft_s - said_s) for ttft_s, said_s in answered if ttft_s is not None and said_s is not None)
    tokens = sum(r.prompt_tokens for r in counted)
    keyed = sum(result.key_blocks.values())
    return Measures(
        requests=len(counted),
        attainment=attained(counted),
        fair_attainment=min(parts),
        attainment_by_quartile=tuple(parts),
        hit_rate=sum(r.hit_tokens for r in counted) / tokens if tokens else 0.0,
        load_cv=load_cv(result, counted),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        missed_wait_p99_s=percentile(missed, 0.99),
        e2e_p50_s=percentile(e2e, 0.5),
        e2e_p90_s=percentile(e2e, 0.9),
        tpot_p50_s=percentile(tpot, 0.5),
        tpot_p90_s=percentile(tpot, 0.9),
        failed=sum(r.failed for r in counted),
        moved=sum(r.moves > 0 for r in counted),
        pulled=sum(r.pulls > 0 for r in counted),
        prediction_error_p50_s=percentile(errors, 0.5),
        prediction_error_p90_s=percentile(errors, 0.9),
        key_depths={depth: count / keyed for depth, count in sorted(result.key_blocks.items())},
        counts=dict(sorted(result.counts.items())),
    )


def load_cv(result: RunResult, counted: Sequence[SimRequest]) -> float:
    """Coefficient of variation of the pending prefill tokens over the instances, mean over the samples with any."""
    if not counted:
        return 0.0
    start_s, end_s = counted[0].arrival_s, counted[-1].arrival_s
    values = []
    for at_s, pending in result.samples:
        mean = sum(pending) / len(pending) if pending else 0.0
        if start_s <= at_s <= end_s and mean > 0:
            variance = sum((tokens - mean) ** 2 for tokens in pending) / len(pending)
            values.append(math.sqrt(variance) / mean)
    return sum(values) / len(values) if values else 0.0


def time_line(result: RunResult, bin_s: float = 5.0) -> list[tuple[float, float, int]]:
    """(start of the bin, attainment of those that arrived in it, how many) over the whole run."""
    bins: dict[int, list[SimRequest]] = {}
    for request in result.requests:
        bins.setdefault(int(request.arrival_s // bin_s), []).append(request)
    return [(number * bin_s, attained(found), len(found)) for number, found in sorted(bins.items())]
