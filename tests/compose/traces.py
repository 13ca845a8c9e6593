"""Checks that the spans of each request join to one trace, from the lines that a trace sink wrote."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

REQUEST = "dualmap.request"
ROUTE = "dualmap.v1.Router/Route"
SUBMIT = "/dualmap.v1.InstanceAgent/Submit"
HAND_OVER = "hand over"
STATES = ("queue wait", "prefill", "decode")
ROUND = "rebalance.round"

Span = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What was found: requests traced, those handed over, and what is wrong, a line each."""

    requests: int
    migrated: int
    problems: tuple[str, ...]


def check_traces(lines: Iterable[str]) -> TraceFacts:
    """Each request: one root, the client's, with Route and Submit under it and its states; moved ones on two agents."""
    by_trace: dict[str, list[Span]] = defaultdict(list)
    rounds: set[str] = set()
    for line in lines:
        span: Span = json.loads(line)
        by_trace[span["trace_id"]].append(span)
        if span["name"] == ROUND:
            rounds.add(span["span_id"])
    requests = [spans for spans in by_trace.values() if any(span["name"] == REQUEST for span in spans)]
    problems = [f"{spans[0]['trace_id']}: {problem}" for spans in requests for problem in _problems(spans, rounds)]
    migrated = sum(1 for spans in requests if any(span["name"] == HAND_OVER for span in spans))
    return TraceFacts(len(requests), migrated, tuple(problems))


def _problems(spans: list[Span], rounds: set[str]) -> list[str]:
    by_id = {span["span_id"]: span for span in spans}
    found = []
    roots = [span["name"] for span in spans if not span["parent_span_id"]]
    if roots != [REQUEST]:
        found.append(f"roots {roots}")
    found += [
        f"{s['name']} hangs on nothing" for s in spans if s["parent_span_id"] and s["parent_span_id"] not in by_id
    ]
    names = {span["name"] for span in spans}
    found += [f"no {name}" for name in (ROUTE, SUBMIT, *STATES) if name not in names]
    root_ids = {span["span_id"] for span in spans if span["name"] == REQUEST}
    for span in spans:
        if span["name"] in {ROUTE, SUBMIT} and not _is_under(span, root_ids, by_id):
            found.append(f"{span['name']} is not under the request")
    moves = [span for span in spans if span["name"] == HAND_OVER]
    if moves:
        agents = {span["attributes"]["dualmap.instance"] for span in spans if span["name"] in {*STATES, HAND_OVER}}
        if len(agents) < 2:
            found.append("handed over, but on one agent only")
        if not any(link["span_id"] in rounds for move in moves for link in move["links"]):
            found.append("handed over, but not linked to the rebalancer's round")
    return found


def _is_under(span: Span, ancestors: set[str], by_id: Mapping[str, Span]) -> bool:
    seen: set[str] = set()
    parent = span["parent_span_id"]
    while parent in by_id and parent not in seen:
        if parent in ancestors:
            return True
        seen.add(parent)
        parent = by_id[parent]["parent_span_id"]
    return False
