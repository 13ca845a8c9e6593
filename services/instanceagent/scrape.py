"""Single values out of a Prometheus page, without parsing what nobody asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


def scrape(page: str, names: Iterable[str]) -> list[Sample]:
    """Samples of the named series in the page's order; lines that are no samples are passed over."""
    wanted = tuple(names)
    samples = []
    for line in page.splitlines():
        if not line.startswith(wanted):
            continue
        match = _LINE.match(line)
        if match is None or match["name"] not in wanted:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            samples.append(Sample(match["name"], dict(_LABEL.findall(match["labels"] or "")), value))
    return samples


def value_of(samples: Iterable[Sample], names: Iterable[str], labels: Mapping[str, str]) -> float | None:
    """The first sample of the first of these names that has these labels, or lacks them; None when there is none."""
    listed = list(samples)
    for name in names:
        for sample in listed:
            if sample.name == name and all(sample.labels.get(key, value) == value for key, value in labels.items()):
                return sample.value
    return None
