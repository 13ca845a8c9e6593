"""Request traces as lists of values: Mooncake JSONL, Azure CSV and agentic sessions, plain or gzip.

A wrong line is an error naming file, line and field, unless ``skip_bad`` says to leave it out. Nothing is repaired.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

OverLong = Literal["cut", "skip"]

MOONCAKE_BLOCK_TOKENS = 512
AZURE_BLOCK_TOKENS = 128
MAX_TOKENS = 100_000_000
"""Lengths above this are a broken line, not a prompt."""

SESSION_GAP_S = 30.0
"""The sessions file tells no start of a session: each starts this long after the one before."""

_SESSION_SHIFT = 40
"""Session-local ids are made global by the session's line number above this bit."""


class TraceError(Exception):
    """A trace cannot be read: correct the named file, line and field, or pass ``skip_bad`` to leave the line out."""

    def __init__(self, path: str, line: int, field: str, problem: str) -> None:
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. ``hash_ids`` are cumulative prefix ids; a last partial block may have one too."""

    index: int
    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int
    session: str = ""

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Ids of the whole blocks: what a cache can hold."""
        return self.hash_ids[: self.input_tokens // self.block_tokens]


class _Bad(Exception):
    """Carried to the place that knows file and line."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field
        self.problem = problem


def read_trace(  # noqa: PLR0917 - the names are the command's options
    path: str | Path,
    limit: int | None = None,
    max_input: int | None = None,
    over_long: OverLong = "cut",
    skip_bad: bool = False,
    on_skip: Callable[[TraceError], None] | None = None,
) -> list[TraceRequest]:
    """Requests of a trace file in order of time; the format is told by its first line.

    Args:
        path: Mooncake JSONL, Azure CSV or agentic sessions (one session a line); gzip by content, not by name.
        limit: at most this many requests, counted in file order after skipping.
        max_input: longest prompt in tokens.
        over_long: a longer prompt is cut to ``max_input``, or its request is skipped.
        skip_bad: leave wrong lines out and tell ``on_skip``; a broken file (gzip, no format) is an error all the same.
        on_skip: told each line left out.

    Times may repeat; times that go back are put in order (stable). Ids may come in any order; an id twice in one
    request, a negative time, a length of 0, and a number of ids that does not fit the length are errors.

    Raises:
        TraceError: with file, line and field.
    """
    name = str(path)
    if limit is not None and limit <= 0:
        raise TraceError(name, 0, "limit", f"{limit} is not positive")
    if max_input is not None and max_input <= 0:
        raise TraceError(name, 0, "max_input", f"{max_input} is not positive")
    found: list[TraceRequest] = []
    for request in _parse(name, skip_bad, on_skip):
        fitted = _fit(request, max_input, over_long)
        if fitted is None:
            continue
        found.append(replace(fitted, index=len(found)))
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise TraceError(name, 0, "", "holds no request")
    found.sort(key=lambda request: request.timestamp_s)
    start_s = found[0].timestamp_s
    return [replace(request, index=i, timestamp_s=request.timestamp_s - start_s) for i, request in enumerate(found)]


def _fit(request: TraceRequest, max_input: int | None, over_long: OverLong) -> TraceRequest | None:
    if max_input is None or request.input_tokens <= max_input:
        return request
    if over_long == "skip":
        return None
    blocks = math.ceil(max_input / request.block_tokens)
    return replace(request, input_tokens=max_input, hash_ids=request.hash_ids[:blocks])


def _parse(name: str, skip_bad: bool, on_skip: Callable[[TraceError], None] | None) -> Iterator[TraceRequest]:
    parse: Callable[[str, int], list[TraceRequest]] | None = None
    for number, raw in _lines(name):
        try:
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise _Bad("encoding", f"not UTF-8 at byte {error.start}") from error
            if not text:
                continue
            if parse is None:
                parse = _format_of(name, number, text)
                if text.startswith("TIMESTAMP"):
                    continue
            yield from parse(text, number)
        except _Bad as bad:
            named = TraceError(name, number, bad.field, bad.problem)
            if not skip_bad:
                raise named from None
            if on_skip is not None:
                on_skip(named)


def _lines(name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with Path(name).open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source = gzip.GzipFile(fileobj=file) if zipped else file
            for number, line in enumerate(source, 1):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(name, number + 1, "gzip", f"truncated or damaged: {error}") from error
    except OSError as error:
        raise TraceError(name, 0, "", error.strerror or str(error)) from error


def _format_of(name: str, number: int, text: str) -> Callable[[str, int], list[TraceRequest]]:
    if text.startswith("TIMESTAMP"):
        columns = [column.strip() for column in text.split(",")]
        if columns[:3] != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
            raise TraceError(name, number, "header", "expected TIMESTAMP,ContextTokens,GeneratedTokens")
        return _azure
    if text.startswith("{"):
        return _sessions if '"requests"' in text else _mooncake
    raise TraceError(name, number, "", "neither Mooncake JSONL, Azure CSV nor agentic sessions")


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Bad("", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Bad("", "not a JSON object")
    return value


def _whole(row: dict[str, object], field: str, least: int) -> int:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Bad(field, "missing" if value is None else f"{value!r} is not a whole number")
    if not least <= value <= MAX_TOKENS:
        raise _Bad(field, f"{value} is not within {least} to {MAX_TOKENS}")
    return value


def _time(row: dict[str, object], field: str) -> float:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _Bad(field, "missing" if value is None else f"{value!r} is not a time")
    if value < 0:
        raise _Bad(field, f"{value} is negative")
    return float(value)


def _ids(row: dict[str, object], input_tokens: int, block_tokens: int) -> list[int]:
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise _Bad("hash_ids", "missing or not a list")
    if any(type(block) is not int or not 0 <= block < 1 << _SESSION_SHIFT for block in ids):
        raise _Bad("hash_ids", f"an id is not a whole number within 0 to 2^{_SESSION_SHIFT}")
    if len(set(ids)) != len(ids):
        raise _Bad("hash_ids", "an id occurs twice")
    if not input_tokens // block_tokens <= len(ids) <= -(-input_tokens // block_tokens):
        raise _Bad("hash_ids", f"{len(ids)} ids do not fit {input_tokens} tokens in blocks of {block_tokens}")
    return ids


def _mooncake(text: str, _number: int) -> list[TraceRequest]:
    row = _object(text)
    tokens = _whole(row, "input_length", 1)
    return [
        TraceRequest(
            index=0,
            timestamp_s=_time(row, "timestamp") / 1000,
            input_tokens=tokens,
            output_tokens=_whole(row, "output_length", 0),
            hash_ids=tuple(_ids(row, tokens, MOONCAKE_BLOCK_TOKENS)),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
    ]


def _azure(text: str, number: int) -> list[TraceRequest]:
    columns = text.split(",")
    if len(columns) < 3:
        raise _Bad("", f"{len(columns)} columns, expected 3")
    try:
        # Times of day are only compared with one another: no zone is needed.
        at_s = (datetime.fromisoformat(columns[0].strip()) - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001
    except (ValueError, TypeError):
        raise _Bad("TIMESTAMP", f"{columns[0]!r} is not a date and time") from None
    lengths: dict[str, object] = {}
    for field, column in zip(("ContextTokens", "GeneratedTokens"), columns[1:3], strict=True):
        if not column.strip().isdecimal():
            raise _Bad(field, f"{column.strip()!r} is not a whole number")
        lengths[field] = int(column)
    tokens = _whole(lengths, "ContextTokens", 1)
    # The trace tells no content: every block is its request's own.
    first = number << _SESSION_SHIFT
    ids = tuple(range(first, first + tokens // AZURE_BLOCK_TOKENS))
    return [TraceRequest(0, at_s, tokens, _whole(lengths, "GeneratedTokens", 0), ids, AZURE_BLOCK_TOKENS)]


def _sessions(text: str, number: int) -> list[TraceRequest]:
    row = _object(text)
    block_tokens = _whole(row, "block_size", 1)
    session = str(row.get("id") or f"line-{number}")
    found: list[TraceRequest] = []
    for offset_s, entry in _flat(row, number * SESSION_GAP_S):
        tokens = _whole(entry, "in", 1)
        ids = _ids(entry, tokens, block_tokens)
        mixed = tuple((number << _SESSION_SHIFT) + block for block in ids)
        at_s = offset_s + _time(entry, "t")
        found.append(TraceRequest(0, at_s, tokens, _whole(entry, "out", 0), mixed, block_tokens, session))
    return found


def _flat(row: dict[str, object], offset_s: float) -> Iterator[tuple[float, dict[str, object]]]:
    entries = row.get("requests")
    if not isinstance(entries, list):
        raise _Bad("requests", "missing or not a list")
    for entry in entries:
        if not isinstance(entry, dict):
            raise _Bad("requests", "an entry is not an object")
        if entry.get("type") == "subagent":
            # A subagent's times start at its own beginning; it shares its parent's ids.
            yield from _flat(entry, offset_s + _time(entry, "t"))
        else:
            yield offset_s, entry
