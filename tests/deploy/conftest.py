"""What the tests of deploy/ share."""

from __future__ import annotations

import asyncio

import pytest

from tests.deploy.metric_families import Family, all_families


@pytest.fixture(scope="session")
def families() -> tuple[Family, ...]:
    return asyncio.run(all_families())
