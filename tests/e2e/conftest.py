"""Whole clusters of real processes for the end-to-end tests: started, used, gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from dualmap.cli.local_cluster import LocalCluster, LocalOptions

Start = Callable[[LocalOptions], AbstractAsyncContextManager[LocalCluster]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a cluster; when the block ends, none of its processes is left."""
    for name in ("DUALMAP_REDIS__URL", "DUALMAP_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)

    @asynccontextmanager
    async def run(options: LocalOptions) -> AsyncIterator[LocalCluster]:
        cluster = LocalCluster(options)
        async with cluster:
            yield cluster
        left = [name for name, service in cluster.services.items() if service.running]
        assert not left

    return run
