"""Figures of the benchmarks: percentiles, ratios, a table, JSON. Judges nothing."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dualmap.cli.bench_load import Timed

_PERCENTS = (50.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of a call, calls measured and calls a second; ``cpu_us`` is the server's own a call."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    calls: int
    rate: float
    cpu_us: float = 0.0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant of the router beside what it is measured against in the same turns."""

    variant: str
    router: Latency
    against: Latency
    against_name: str = "empty call"

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Router over the other at p50, p99, p99.9."""
        ours, theirs = self.router, self.against
        return (
            _ratio(ours.p50_ms, theirs.p50_ms),
            _ratio(ours.p99_ms, theirs.p99_ms),
            _ratio(ours.p999_ms, theirs.p999_ms),
        )

    @property
    def rate_ratio(self) -> float:
        """Router's rate over the other's."""
        return _ratio(self.router.rate, self.against.rate)


def _ratio(ours: float, theirs: float) -> float:
    return round(ours / theirs, 3) if theirs else 0.0


def latency_of(timed: Timed, cpu_s: float = 0.0) -> Latency:
    """Percentiles of what was timed; all zero where nothing was answered."""
    count = len(timed.latency_s)
    p50, p99, p999 = np.percentile(np.array(timed.latency_s or [0.0]) * 1e3, _PERCENTS)
    cpu_us = cpu_s / count * 1e6 if count else 0.0
    return Latency(float(p50), float(p99), float(p999), count, timed.rate, cpu_us, len(timed.refused_s), timed.failed)


def comparison_table(title: str, rows: Sequence[Comparison]) -> Table:
    """One row a variant: both sides' percentiles, then the ratios."""
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for name in (
        "ms p50 p99 p99.9",
        "against, ms",
        "ratio p50",
        "p99",
        "p99.9",
        "calls/s",
        "ratio",
        "server µs a call",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratios = [f"{ratio:.2f}" for ratio in row.ratios]
        cpu = f"{row.router.cpu_us:.0f} : {row.against.cpu_us:.0f}"
        rate = f"{row.router.rate:,.0f}"
        table.add_row(row.variant, _three(row.router), _three(row.against), *ratios, rate, f"{row.rate_ratio:.2f}", cpu)
    return table


def _three(latency: Latency) -> str:
    return f"{latency.p50_ms:.2f} {latency.p99_ms:.2f} {latency.p999_ms:.2f}"


def machine() -> dict[str, Any]:
    """What the figures were measured on; others' load is part of it."""
    return {"cores": os.cpu_count(), "load_average_1min": round(os.getloadavg()[0], 1)}


def write(path: Path | None, console: Console, figures: dict[str, Any]) -> None:
    """Write all figures as JSON; nothing without a path, to stdout for ``-``."""
    if path is None:
        return
    text = json.dumps({"machine": machine(), **figures}, default=_plain, indent=1, ensure_ascii=False)
    if str(path) == "-":
        console.file.write(text + "\n")
    else:
        path.write_text(text + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Comparison):
        return {**dataclasses.asdict(value), "ratios": value.ratios, "rate_ratio": value.rate_ratio}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
