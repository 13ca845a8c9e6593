"""Results as Markdown and JSON files. It formats what it is given and computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dualmap.simulator.goodput import SEEDS
from dualmap.simulator.paper_desk import Extent
from dualmap.simulator.report import Measures
from dualmap.simulator.study import SCHEMA_VERSION, means

Rows = Sequence[Sequence[str]]

RUN_HEAD = (
    "trial",
    "in SLO",
    "range over seeds",
    "fair",
    "hit",
    "CV",
    "p50 s",
    "p90 s",
    "p99 s",
    "p99 of missed s",
    "moved",
    "pulled",
    "prediction off by p90 s",
)


@dataclass(slots=True)
class Document:
    """One file of tables, its pictures and its JSON."""

    name: str
    title: str
    parts: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """A sentence."""
        self.parts.append(text)

    def table(self, title: str, head: Sequence[str], rows: Rows) -> None:
        """A table under its title."""
        lines = [f"## {title}", "", _line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]
        self.parts.append("\n".join(lines))

    def runs(self, title: str, rows: Rows) -> None:
        """A table of runs at one rate."""
        self.table(title, RUN_HEAD, rows)

    def picture(self, folder: Path, file: str, draw: Callable[..., None], *values: object) -> None:
        """A plot in the same folder."""
        draw(folder / file, *values)
        self.pictures.append(file)

    def write(self, folder: Path, command: str) -> None:
        """The Markdown and the JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        pictures = [f"![{picture}]({picture})" for picture in self.pictures]
        text = "\n\n".join([f"# {self.title}", f"Made by `{command}`.", *self.parts, *pictures])
        (folder / f"{self.name}.md").write_text(text + "\n", encoding="utf-8")
        if self.data:
            value = {"schema": SCHEMA_VERSION, "kind": f"paper:{self.name}", "results": self.data}
            (folder / f"{self.name}.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def run_rows(found: Mapping[str, Sequence[Measures]]) -> list[list[str]]:
    """Rows of a table of runs: means over the seeds, and the range of attainment."""
    rows = []
    for label, measures in found.items():
        mean = means(measures)
        low, high = min(one.attainment for one in measures), max(one.attainment for one in measures)
        row = [label, f"{mean['attainment']:.3f}", f"{low:.3f} to {high:.3f}"]
        row += [f"{mean[name]:.3f}" for name in ("fair_attainment", "hit_rate", "load_cv")]
        row += [f"{mean[name]:.2f}" for name in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "missed_wait_p99_s")]
        row += [f"{mean[name]:.0f}" for name in ("moved", "pulled")]
        rows.append([*row, f"{mean['prediction_error_p90_s']:.2f}"])
    return rows


def write_index(
    folder: Path,
    sections: Sequence[str],
    facts: Mapping[str, tuple[float, float, int, int]],
    command: str,
    extent: Extent,
) -> None:
    """The page that leads to the others: those of this call and of calls before it."""
    lines = [
        "# What the decisions are worth, in virtual time",
        "",
        (
            "Poisson arrivals, prompts cut to 20,480 tokens, 0.16 ms a token and 20 ms a prefill, TTFT objective 5 s, "
            "the warm-up not counted. Each page names the call that made it; its figures are means over the seeds "
            f"1 to --seeds ({len(SEEDS)} unless told), ranges are over them. The newest call: `{command}`."
        ),
    ]
    if extent.quick:
        lines += [
            "",
            "A quick call: short traces, one seed: other figures than a full one's; some sections on one trace.",
        ]
    if not extent.peers:
        lines += ["", "dynamo is not here: its package is not installed (`pip install 'dualmap[peers]'`)."]
    lines += ["", "| workload | requests | warm-up | bound req/s | hit ceiling |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {count} | {warmup} | {bound:.2f} | {hit:.3f} |"
        for name, (bound, hit, count, warmup) in facts.items()
    ]
    there = [folder / f"{name}.md" for name in sections if (folder / f"{name}.md").exists()]
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in there]
    lines += ["", *(f"- [{title}]({path.name})" for title, path in zip(titles, there, strict=True)), ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")
