"""The picture of a trace shows what the spans say."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.compose.trace_picture import rows_of, svg


def _span(name: str, span_id: str, parent: str, times_ms: tuple[int, int], **more: Any) -> str:
    facts = {"trace_id": "t", "service": "dualmap-instanceagent", "links": [], "attributes": {}} | more
    times = {"start_ns": times_ms[0] * 10**6, "end_ns": times_ms[1] * 10**6}
    return json.dumps({"name": name, "span_id": span_id, "parent_span_id": parent} | times | facts)


def _at(instance: str, **more: Any) -> dict[str, Any]:
    return {"dualmap.instance": instance} | more


@pytest.fixture
def lines() -> list[str]:
    """A request that was handed over from a to b, its spans in no order."""
    root = {"dualmap.request_id": "r<1>", "dualmap.ttft_ms": 70.0}
    return [
        _span("rebalance.round", "round", "", (5, 25), service="dualmap-rebalancer", trace_id="other"),
        _span("decode", "d", "h", (70, 100), attributes=_at("b/0")),
        _span("prefill", "p", "h", (40, 70), attributes=_at("b/0")),
        _span("queue wait", "w2", "h", (31, 40), attributes=_at("b/0")),
        _span("hand over", "h", "s", (30, 100), attributes=_at("a/0"), links=[{"span_id": "round"}]),
        _span("queue wait", "w1", "s", (12, 30), attributes=_at("a/0")),
        _span("/dualmap.v1.InstanceAgent/Submit", "s", "q", (11, 100)),
        _span("dualmap.request", "q", "", (10, 100), service="dualmap-client", attributes=root),
    ]


def test_rows_are_nested_and_named_for_who_did_them(lines: list[str]) -> None:
    """The round that moved it comes below the hand-over; a Submit is at the instance of its states."""
    rows = rows_of(lines)

    assert [(row.depth, row.name, row.who) for row in rows] == [
        (0, "dualmap.request", "client"),
        (1, "InstanceAgent/Submit", "a/0"),
        (2, "queue wait", "a/0"),
        (2, "hand over", "a/0"),
        (3, "rebalance.round", "rebalancer"),
        (3, "queue wait", "b/0"),
        (3, "prefill", "b/0"),
        (3, "decode", "b/0"),
    ]
    assert (rows[0].start_ms, rows[0].end_ms, rows[0].facts) == (0.0, 90.0, ("TTFT 70 ms",))
    assert [row.start_ms for row in rows if row.is_linked] == [-5.0]


def test_the_picture_is_whole_xml_with_a_bar_a_row(lines: list[str]) -> None:
    """And a legend entry for each who."""
    drawn = ET.fromstring(svg(rows_of(lines, "r<1>")))  # noqa: S314  (our own)

    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 4 + 8


def test_a_request_that_is_not_there_is_said(lines: list[str]) -> None:
    """By its name."""
    with pytest.raises(ValueError, match="no trace of other"):
        rows_of(lines, "other")
