"""Boards and alert rules as they are in deploy/: their queries, ready to be run or checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
BOARDS = tuple(sorted((DEPLOY / "grafana" / "boards").glob("*.json")))

_METRIC = re.compile(r"\b((?:dualmap|process|python)_[a-z0-9_]+)\b")
_VARIABLES = {"$__rate_interval": "1m", "$pool": ".*"}


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of one panel, as Grafana would send it for all pools."""

    board: str
    panel: str
    query: str


def load_board(path: Path) -> dict[str, Any]:
    """A board's JSON."""
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def panel_queries() -> Iterator[PanelQuery]:
    """Every query of every board."""
    for path in BOARDS:
        for panel in load_board(path)["panels"]:
            for target in panel["targets"]:
                yield PanelQuery(path.stem, panel["title"], fill_in(target["expr"]))


def fill_in(query: str) -> str:
    """The query with the boards' variables replaced."""
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return query


def alert_rules() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_named(query: str) -> set[str]:
    """Series that a query names."""
    return set(_METRIC.findall(query))
