"""A router's handler over a full view in this process, without a server: for profiles and prices."""

from __future__ import annotations

import random
import threading
import time

from opentelemetry.sdk.trace import TracerProvider

from dualmap.cli.bench_workload import POOL, Form, indexes, ring_of, samples, whole_state
from dualmap.core.choose import ChooseOptions
from dualmap.view.cluster_view import ClusterView, ViewOptions
from services.router.decider import Decider, RouterFacts
from services.router.heat_sampler import HeatSampler
from services.router.metrics import RouterMetrics
from services.router.servicer import RouterServicer
from services.router.spans import RouteSpans

ROUTER_ID = 7


def full_view(form: Form, instances: int = 8, blocks: int = 9_362) -> ClusterView:
    """The view that the benchmarks' router reads from Redis, filled by hand."""
    view = ClusterView(POOL, threading.Lock(), lambda: time.monotonic() * 1000, ViewOptions(ROUTER_ID))
    view.adopt_ring(ring_of(instances))
    for name, index in indexes(instances, blocks, samples(form)).items():
        if not view.instances[name].apply(whole_state(name, index), view.clock_ms()):
            raise RuntimeError(f"{name}: state refused")
    view.degraded = False
    return view


def servicer_over(view: ClusterView, provider: TracerProvider | None = None) -> RouterServicer:
    """The router's servicer as its app builds it."""
    metrics = RouterMetrics(POOL)
    sampler = HeatSampler(512, random.random)
    facts = RouterFacts(ROUTER_ID, POOL, ("default",), b"", ChooseOptions())
    decider = Decider(view, facts, metrics, sampler, random.random)
    return RouterServicer(decider, RouteSpans(provider) if provider else None)
