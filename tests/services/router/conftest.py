"""A router over four idle instances."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.router.harness import Router, pool_of, running_router


@pytest.fixture
def router() -> Iterator[Router]:
    with running_router(pool_of(4)) as running:
        yield running
