"""Boards and provisioning parse, and every query names metrics that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.boards import BOARDS, DEPLOY, load_board, metrics_named, panel_queries
from tests.deploy.metric_families import Family

PROVISIONING = DEPLOY / "grafana" / "provisioning"


def test_every_panel_asks_for_metrics_that_some_service_has(families: tuple[Family, ...]) -> None:
    """A renamed metric must not leave an empty panel behind."""
    known = {series for family in families for series in family.series}
    unknown = {
        (query.board, query.panel, name)
        for query in panel_queries()
        for name in metrics_named(query.query)
        if name not in known
    }

    assert not unknown


def test_every_query_names_a_metric() -> None:
    """No query is a constant, and each shows data of ours."""
    assert all(metrics_named(query.query) for query in panel_queries())


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_is_whole(path: Path) -> None:
    """Unique panels that do not overlap, each explained, each asking the provisioned source."""
    board = load_board(path)
    panels = board["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] and panel["targets"] for panel in panels)
    assert {panel["datasource"]["uid"] for panel in panels} <= _datasource_uids()


def test_three_boards_are_provisioned_under_names_of_their_own() -> None:
    """Cluster, router and why, found in the folder that the provider names."""
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "boards.yml").read_text())["providers"][0]
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    mounts = compose["services"]["grafana"]["volumes"]

    assert [path.stem for path in BOARDS] == ["cluster", "router", "why"]
    assert len({load_board(path)["uid"] for path in BOARDS}) == 3
    assert f"./deploy/grafana/boards:{provider['options']['path']}:ro" in mounts


def _datasource_uids() -> set[str]:
    sources = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    return {source["uid"] for source in sources}
