"""What the cluster's Prometheus says: targets, alerts, and the answer to every panel of every board."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.compose.engine import Failed
from tests.deploy.boards import panel_queries

POLL_S = 1.0


class Monitoring:
    """One Prometheus at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1"

    def wait_targets(self, expected: int, timeout_s: float) -> None:
        """Wait until so many targets exist and every one is up. Raises Failed with those that are not."""
        _until(lambda: self._targets_problem(expected), timeout_s)

    def wait_value(self, query: str, expected: float, timeout_s: float) -> None:
        """Wait until a query gives this one number."""
        _until(lambda: self._value_problem(query, expected), timeout_s)

    def wait_panels(self, timeout_s: float) -> int:
        """Wait until every panel's queries give data; the number of queries. Raises Failed with the empty ones."""
        _until(self._panels_problem, timeout_s)
        return sum(1 for _ in panel_queries())

    def firing(self) -> list[str]:
        """Names of the alerts that fire."""
        return [alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"]

    def _targets_problem(self, expected: int) -> str | None:
        targets = self._get("targets")["activeTargets"]
        down = [
            f"{target['labels']['job']} {target['labels']['target']}" for target in targets if target["health"] != "up"
        ]
        return (
            None if len(targets) == expected and not down else f"{len(targets)} targets of {expected}, not up: {down}"
        )

    def _value_problem(self, query: str, expected: float) -> str | None:
        found = [float(series["value"][1]) for series in self._query(query)]
        return None if found == [expected] else f"{query} is {found}, not {expected:g}"

    def _panels_problem(self) -> str | None:
        empty = [f"{q.board}: {q.panel}: {q.query}" for q in panel_queries() if not self._has_data(q.query)]
        return "no data:\n" + "\n".join(empty) if empty else None

    def _has_data(self, query: str) -> bool:
        return any(series["value"][1] != "NaN" for series in self._query(query))

    def _query(self, query: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("query", query=query)["result"]
        return result

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        with urlopen(f"{self._base}/{path}?{urlencode(parameters)}", timeout=10) as answer:  # noqa: S310  (our own)
            data: dict[str, Any] = json.load(answer)["data"]
        return data


def _until(problem_of: Callable[[], str | None], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            problem = problem_of()
        except (URLError, ConnectionError, TimeoutError) as error:
            problem = f"Prometheus does not answer: {error}"
        if problem is None:
            return
        if time.monotonic() > until_s:
            raise Failed(problem)
        time.sleep(POLL_S)
