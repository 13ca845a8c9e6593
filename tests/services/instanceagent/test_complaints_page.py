"""The page of complaints names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_named_on_the_page_exists() -> None:
    """A promise whose test was renamed or removed is no promise."""
    page = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert len(named) > 40
    assert not missing
