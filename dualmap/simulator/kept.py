"""Results kept as they come, one JSON line each, so that a long set of runs that was stopped goes on where it was.

A result is taken up again only for the same requests, options, rate and seed, and the same code of the decisions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dualmap.simulator.goodput import Trial, Workload, goodput, measure_at, time_line_at

TIME_LINE_BIN_S = 20.0
_WITHOUT_INFLUENCE = ("paper", "plots", "kept")
"""Files of the simulator, by the start of their name, that change no result."""


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of work. ``rate``: of the run, or the first guess of a bisection."""

    kind: Literal["run", "goodput", "time_line"]
    workload: str
    trial: Trial
    rate: float
    seed: int
    target: float = 0.0
    fair: bool = False


def do(job: Job) -> object:
    """Run it in a process that holds the workload; the value is plain, as JSON gives it back."""
    if job.kind == "goodput":
        return goodput(job.workload, job.trial, job.target, job.fair, job.rate, job.seed)
    if job.kind == "time_line":
        found = time_line_at(job.workload, job.trial, job.rate, job.seed, TIME_LINE_BIN_S)
        return [list(one) for one in found]
    return json.loads(json.dumps(measure_at(job.workload, job.trial, job.rate, job.seed).as_dict()))


def code_digest() -> str:
    """Of the sources that decide and simulate."""
    root = Path(__file__).parent
    files = [*sorted(root.parent.joinpath("core").rglob("*.py")), *sorted(root.rglob("*.py"))]
    digest = hashlib.sha256()
    for file in files:
        if file.parent != root or not file.name.startswith(_WITHOUT_INFLUENCE):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


class Kept:
    """The file of results. ``older``: those of other code count too."""

    def __init__(self, path: Path | None, *, older: bool = False) -> None:
        self._path = path
        self._code = code_digest()
        self.found: dict[str, Any] = {}
        self.of_other_code = 0
        if path is None or not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                key, code, value = row["key"], row["code"], row["value"]
            except (ValueError, KeyError, TypeError):
                # The last line of a run that was killed while it wrote.
                continue
            if code == self._code or older:
                self.of_other_code += code != self._code
                self.found[key] = value

    def put(self, key: str, job: Job, value: object) -> None:
        """Keep a result."""
        self.found[key] = value
        if self._path is None:
            return
        row = {
            "key": key,
            "code": self._code,
            "kind": job.kind,
            "workload": job.workload,
            "trial": job.trial.label,
            "rate": job.rate,
            "seed": job.seed,
            "value": value,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            # A killed run may have left half a line.
            file.write(("\n" if file.tell() else "") + json.dumps(row))


class Runner:
    """Gives jobs to a pool, each once, and takes from ``kept`` what is there."""

    def __init__(self, pool: ProcessPoolExecutor, workloads: Sequence[Workload], kept: Kept) -> None:
        self._pool = pool
        self._kept = kept
        self._workloads: Mapping[str, str] = {one.name: _digest((one.requests, one.warmup)) for one in workloads}
        self._asked: dict[str, Future[Any]] = {}
        self.on_done: Callable[[], None] = lambda: None

    @property
    def jobs(self) -> int:
        """Different jobs asked for."""
        return len(self._asked)

    def ask(self, job: Job) -> Future[Any]:
        """The result to come."""
        options = (job.kind, self._workloads[job.workload], job.trial.policy, job.trial.options)
        key = _digest((*options, job.rate, job.seed, job.target, job.fair))
        future = self._asked.get(key)
        if future is not None:
            return future
        if key in self._kept.found:
            future = Future()
            future.set_result(self._kept.found[key])
        else:
            future = self._pool.submit(do, job)
            future.add_done_callback(lambda done: self._done(key, job, done))
        self._asked[key] = future
        return future

    def finished(self) -> int:
        """How many of those asked for are there."""
        return sum(future.done() for future in self._asked.values())

    def _done(self, key: str, job: Job, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._kept.put(key, job, future.result())
        self.on_done()
