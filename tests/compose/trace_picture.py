"""`python -m tests.compose.trace_picture SPANS.jsonl PICTURE.svg [REQUEST_ID]`: one request's trace as a waterfall.

Takes the lines that a trace sink writes. Without an id it is the first request that was handed over once.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.compose.traces import HAND_OVER, REQUEST, ROUND, STATES, Span

WIDTH, LEFT, RIGHT, ROW = 1080, 300, 24, 30
COLOURS = {"client": "#57606a", "router": "#8250df", "rebalancer": "#bf3989"}
AGENT_COLOURS = ("#0969da", "#bc4c00", "#1a7f37")
_SHOWN = (
    ("dualmap.reason", "{}"),
    ("dualmap.ttft_ms", "TTFT {:.0f} ms"),
    ("dualmap.predicted_ttft_ms", "predicted TTFT {:.0f} ms"),
    ("dualmap.state_age_ms", "state age {:.0f} ms"),
    ("dualmap.hit_tokens", "hit {} tokens"),
    ("dualmap.miss_tokens", "miss {} tokens"),
    ("dualmap.cause", "cause {}"),
    ("gen_ai.usage.output_tokens", "{} tokens out"),
)
_OF_ROOT = (("dualmap.ttft_ms", "TTFT {:.0f} ms"), ("dualmap.handovers", "handed over {} time"))
"""The rest is said at the spans that it comes from."""


@dataclass(frozen=True, slots=True)
class Row:
    """One bar; times in milliseconds from the request's begin."""

    name: str
    depth: int
    who: str
    start_ms: float
    end_ms: float
    facts: tuple[str, ...]
    is_linked: bool = False


def rows_of(lines: Iterable[str], request_id: str = "") -> list[Row]:
    """The rows of one request, top down. Raises ValueError when no such request is there."""
    by_trace: dict[str, list[Span]] = defaultdict(list)
    by_id: dict[str, Span] = {}
    for line in lines:
        span: Span = json.loads(line)
        by_trace[span["trace_id"]].append(span)
        by_id[span["span_id"]] = span
    for spans in by_trace.values():
        roots = [span for span in spans if span["name"] == REQUEST]
        if roots and _is_wanted(roots[0], spans, request_id):
            return list(_walk(roots[0], spans, by_id))
    raise ValueError(f"no trace of {request_id or 'a request handed over once'}")


def _is_wanted(root: Span, spans: Sequence[Span], request_id: str) -> bool:
    if request_id:
        return bool(root["attributes"].get("dualmap.request_id") == request_id)
    names = [span["name"] for span in spans]
    return names.count(HAND_OVER) == 1 and set(STATES) <= set(names)


def _walk(root: Span, spans: Sequence[Span], by_id: dict[str, Span]) -> Iterator[Row]:
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: int(one["start_ns"])):
        children[span["parent_span_id"]].append(span)

    def row(span: Span, depth: int, is_linked: bool = False) -> Row:
        start_ms, end_ms = ((span[edge] - root["start_ns"]) / 1e6 for edge in ("start_ns", "end_ns"))
        name = span["name"].removeprefix("/").removeprefix("dualmap.v1.")
        who = _who(span, children[span["span_id"]], by_id)
        facts = _facts(span["attributes"], _OF_ROOT if span is root else _SHOWN)
        return Row(name, depth, who, start_ms, end_ms, facts, is_linked)

    def below(span: Span, depth: int) -> Iterator[Row]:
        yield row(span, depth)
        for link in span["links"]:
            if link["span_id"] in by_id and by_id[link["span_id"]]["name"] == ROUND:
                yield row(by_id[link["span_id"]], depth + 1, is_linked=True)
        for child in children[span["span_id"]]:
            yield from below(child, depth + 1)

    yield from below(root, 0)


def _who(span: Span, children: Sequence[Span], by_id: dict[str, Span]) -> str:
    service = str(span["service"]).removeprefix("dualmap-")
    if service != "instanceagent":
        return service
    parent = by_id.get(span["parent_span_id"])
    if "Accept" in span["name"] and parent is not None:
        return str(parent["attributes"].get("dualmap.target", service))
    own = span["attributes"].get("dualmap.instance")
    return str(own or next((child["attributes"].get("dualmap.instance", service) for child in children), service))


def _facts(attributes: dict[str, Any], shown: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(form.format(attributes[key]) for key, form in shown if key in attributes)


def svg(rows: Sequence[Row]) -> str:
    """The picture: names on the left, bars coloured by who did it, facts in or beside them."""
    whole_ms = max(row.end_ms for row in rows if not row.is_linked)
    agents = list(dict.fromkeys(row.who for row in rows if row.who not in COLOURS))
    colours = COLOURS | {agent: AGENT_COLOURS[at % len(AGENT_COLOURS)] for at, agent in enumerate(agents)}
    scale = (WIDTH - LEFT - RIGHT) / whole_ms
    height = 64 + ROW * len(rows)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="12" '
            'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">'
        ),
        "<title>Trace of a request that was moved</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        *_legend(colours, rows),
        *_grid(whole_ms, scale, height),
    ]
    for at, row in enumerate(rows):
        parts += _bar(row, 58 + at * ROW, scale, colours[row.who])
    return "\n".join([*parts, "</svg>", ""])


def _legend(colours: dict[str, str], rows: Sequence[Row]) -> Iterator[str]:
    x = 12
    for who in dict.fromkeys(row.who for row in rows):
        text = who if who in COLOURS else f"agent {who}"
        yield f'<rect x="{x}" y="10" width="12" height="12" rx="2" fill="{colours[who]}"/>'
        yield f'<text x="{x + 17}" y="20" fill="#1f2328">{escape(text)}</text>'
        x += 40 + 7 * len(text)


def _grid(whole_ms: float, scale: float, height: int) -> Iterator[str]:
    step = next(step for step in (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10**6) if whole_ms / step <= 8)
    for tick in range(0, int(whole_ms) + 1, step):
        x = LEFT + tick * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="50" y2="{height - 6}" stroke="#d1d9e0"/>'
        yield f'<text x="{x:.1f}" y="44" text-anchor="middle" fill="#59636e">{tick} ms</text>'


def _bar(row: Row, y: float, scale: float, colour: str) -> Iterator[str]:
    # A round that caused a move may have begun before the request came.
    start, end = LEFT + max(row.start_ms, 0.0) * scale, LEFT + max(row.end_ms, 0.0) * scale
    width = max(end - start, 2.0)
    name = f"↗ link: {row.name}" if row.is_linked else row.name
    style = f'fill="#ffffff" stroke="{colour}" stroke-dasharray="3 2"' if row.is_linked else f'fill="{colour}"'
    yield f'<text x="{12 + 14 * row.depth}" y="{y + 16}" fill="#1f2328">{escape(name)}</text>'
    yield f'<rect x="{start:.1f}" y="{y + 4}" width="{width:.1f}" height="16" rx="2" {style}/>'
    inside = 0 if row.is_linked else width
    text = _fitting(row, max(inside, WIDTH - start - width))
    is_inside = _room(text) <= inside
    x, fill = (start + 6, "#ffffff") if is_inside else (start + width + 6, "#1f2328")
    yield f'<text x="{x:.1f}" y="{y + 16}" fill="{fill}">{escape(text)}</text>'


def _fitting(row: Row, room: float) -> str:
    """The duration and as many facts as there is room for."""
    facts = [f"{row.end_ms - row.start_ms:.1f} ms", *row.facts]
    while len(facts) > 1 and _room(", ".join(facts)) > room:
        facts.pop()
    return ", ".join(facts)


def _room(text: str) -> float:
    return 6.2 * len(text) + 12


def main(arguments: Sequence[str]) -> int:
    """Draw; gives the exit code."""
    if len(arguments) not in {2, 3}:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    lines = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
    Path(arguments[1]).write_text(svg(rows_of(lines, *arguments[2:])), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
