"""`dualmap simulate paper`: runs the whole set and writes tables beside the published figures, JSON and plots.

Every figure in the files comes from the runs of this call, or of an earlier one whose results were kept; what a quick
call leaves out is said in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dualmap.simulator.arrivals import ceiling_hit_rate
from dualmap.simulator.goodput import Workload
from dualmap.simulator.kept import Runner
from dualmap.simulator.paper_desk import Desk, Extent
from dualmap.simulator.paper_sections import SECTIONS
from dualmap.simulator.paper_text import Document, write_index


def write_paper(  # noqa: PLR0917 - one call, from the command
    runner: Runner,
    workloads: Sequence[Workload],
    folder: Path,
    extent: Extent,
    command: str,
    on_asked: Callable[[], None] = lambda: None,
) -> list[Document]:
    """Ask for every run of the sections wanted, then write each section as its runs are there; ``on_asked`` between."""
    desk = Desk(runner, workloads, folder, extent)
    steps = [section(desk) for name, section in SECTIONS.items() if name in extent.sections]
    for step in steps:
        next(step)
    on_asked()
    documents = []
    for step in steps:
        try:
            next(step)
        except StopIteration as written:
            document: Document = written.value
            document.write(folder, command)
            documents.append(document)
    facts = {
        name: (desk.bounds[name], ceiling_hit_rate(one.requests, one.warmup), len(one.requests), one.warmup)
        for name, one in desk.workloads.items()
    }
    write_index(folder, list(SECTIONS), facts, command, extent)
    return documents
