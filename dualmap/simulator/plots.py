"""Plots of simulator results as SVG files; it draws values it is given and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualmap.simulator.report import Measures

mpl.rcParams["svg.hashsalt"] = "dualmap"

Series = Mapping[str, Sequence[tuple[float, float]]]


def _axes(x_label: str, y_label: str, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date inside: equal results give equal files.
    figure.savefig(path, format="svg", metadata={"Date": None})


def draw_trade_off(path: Path, title: str, points: Mapping[str, tuple[float, float]]) -> None:
    """Hit rate against the CV of load, a point a policy (the paper's figure 1)."""
    figure, axes = _axes("CV of pending prefill tokens (left is balanced)", "hit rate", title)
    for label, (cv, hit) in points.items():
        axes.scatter([cv], [hit], s=36)
        axes.annotate(label, (cv, hit), textcoords="offset points", xytext=(5, 4), fontsize=8)
    _save(figure, path)


def draw_curves(path: Path, title: str, x_label: str, y_label: str, curves: Series) -> None:
    """One line a label, over rates or over time (the paper's figure 3)."""
    figure, axes = _axes(x_label, y_label, title)
    for label, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=label)
    axes.legend(fontsize=8)
    _save(figure, path)


def draw_bars(path: Path, title: str, y_label: str, bars: Mapping[str, tuple[float, float, float]]) -> None:
    """A bar a label with its range: (value, lowest, highest)."""
    figure, axes = _axes("", y_label, title)
    labels = list(bars)
    values = [bars[label][0] for label in labels]
    below = [value - bars[label][1] for label, value in zip(labels, values, strict=True)]
    above = [bars[label][2] - value for label, value in zip(labels, values, strict=True)]
    axes.bar(labels, values, yerr=[below, above], capsize=3)
    axes.tick_params(axis="x", labelrotation=30)
    _save(figure, path)


def draw_runs(folder: Path, found: Mapping[str, Sequence[Measures]]) -> None:
    """The plots of ``dualmap simulate run``: trade-off, TTFT percentiles, attainment by quartile of length."""
    points = {
        label: (
            sum(one.load_cv for one in measures) / len(measures),
            sum(one.hit_rate for one in measures) / len(measures),
        )
        for label, measures in found.items()
    }
    draw_trade_off(folder / "trade_off.svg", "Cache against balance", points)
    ttft = {
        label: [(50.0, measures[0].ttft_p50_s), (90.0, measures[0].ttft_p90_s), (99.0, measures[0].ttft_p99_s)]
        for label, measures in found.items()
    }
    draw_curves(folder / "ttft.svg", "Time to first token", "percentile", "seconds", ttft)
    parts = {
        label: [(float(part + 1), value) for part, value in enumerate(measures[0].attainment_by_quartile)]
        for label, measures in found.items()
    }
    draw_curves(folder / "quartiles.svg", "By length of prompt", "quartile, shortest first", "share in SLO", parts)
