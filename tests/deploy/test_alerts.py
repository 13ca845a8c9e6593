"""Alert rules: made of metrics that exist, each tried by promtool against what it is for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dualmap.core.choose import Reason
from dualmap.view.events import ViewEvent
from tests.deploy.boards import ALERTS, alert_rules, metrics_named
from tests.deploy.metric_families import Family

RULE_TESTS = Path(__file__).with_name("alerts_test.yml")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def test_every_alert_asks_for_metrics_that_some_service_has(families: tuple[Family, ...]) -> None:
    """An alert on a renamed metric would never fire."""
    known = {series for family in families for series in family.series}
    unknown = {(rule["alert"], name) for rule in alert_rules() for name in metrics_named(rule["expr"]) - known}

    assert not unknown


def test_every_reason_that_an_alert_picks_exists() -> None:
    """An alert on a renamed reason would never fire."""
    picked = {reason for rule in alert_rules() for reason in re.findall(r'reason="(\w+)"', rule["expr"])}

    assert picked
    assert picked <= {reason.name for reason in Reason} | {event.value for event in ViewEvent}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    """Whoever is woken by one reads it without the source at hand."""
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in alert_rules())


def test_every_alert_is_tried() -> None:
    """Each has a case in the rule tests."""
    tried = RULE_TESTS.read_text(encoding="utf-8")

    assert [rule["alert"] for rule in alert_rules() if rule["alert"] not in tried] == []


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("test", "rules", RULE_TESTS), ("check", "config", ALERTS.with_name("prometheus.yml"))],
    ids=["rules", "config"],
)
def test_promtool_accepts(arguments: tuple[str | Path, ...]) -> None:
    """Prometheus's own tool takes the configuration, and the alerts fire when they should and only then."""
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
