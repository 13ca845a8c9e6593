"""docs/metrics.md is what the code has."""

from __future__ import annotations

from tests.deploy.metric_families import Family
from tests.deploy.metrics_page import PAGE, page_of


def test_the_page_is_what_the_code_has(families: tuple[Family, ...]) -> None:
    """`make metrics` was run after the last change of a metric."""
    assert PAGE.read_text(encoding="utf-8") == page_of(families), "run 'make metrics' and commit docs/metrics.md"


def test_every_metric_of_ours_is_explained_and_labelled_as_promised(families: tuple[Family, ...]) -> None:
    """A help text each; labels are pool, instance and reason, or a name of the code, never of a request."""
    ours = [family for family in families if family.name.startswith("dualmap_")]
    allowed = {"pool", "instance", "reason", "state", "method", "code", "loop"}

    assert ours
    assert [family.name for family in ours if not family.help_text] == []
    assert [family.name for family in ours if not set(family.labels) <= allowed] == []
