"""`python -m tests.deploy.metrics_page`: writes docs/metrics.md from the registries; `make metrics` calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.metric_families import Family, all_families

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

_TITLES = {
    "router": "Router",
    "ringmanager": "Ring manager",
    "statecollector": "State collector",
    "rebalancer": "Rebalancer",
    "instanceagent": "Instance agent",
}
_INTRODUCTION = """# Metrics

Written by `make metrics` from the code; do not edit. Each service serves them at `/metrics` of its metrics port,
beside `/livez` and `/readyz`. Units are in the names. Labels: `pool`, `instance` (the instance a number is about),
`reason`; in Prometheus `target` is the process that said it. Series of an instance that left go after five minutes.
A histogram adds `_bucket`, `_sum` and `_count` to its name. Boards: [deploy/grafana/boards](../deploy/grafana/boards);
alerts: [deploy/prometheus/alerts.yml](../deploy/prometheus/alerts.yml).
"""


def page_of(families: Iterable[Family]) -> str:
    """The page as Markdown: what all services have first, then each service's own."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    shared = {name for name, found in by_name.items() if len(found) == len(_TITLES)}
    parts = [_INTRODUCTION, _section("Every service", (by_name[name][0] for name in shared))]
    for service, title in _TITLES.items():
        own = (f for found in by_name.values() for f in found if f.service == service and f.name not in shared)
        parts.append(_section(title, own))
    return "\n".join(parts)


def _section(title: str, families: Iterable[Family]) -> str:
    lines = [f"## {title}\n", "| metric | kind | labels | what |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda family: family.name):
        name = family.name + ("_total" if family.kind == "counter" else "")
        labels = ", ".join(family.labels)
        lines.append(f"| `{name}` | {family.kind} | {labels} | {family.help_text.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_of(asyncio.run(all_families())), encoding="utf-8")


if __name__ == "__main__":
    main()
