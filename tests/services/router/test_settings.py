"""Promises of the router's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.core.choose import ChooseOptions
from services.router.settings import RouterSettings, Settings


def test_the_defaults_are_the_cores_own() -> None:
    """What the simulator measures is what routes: no default is said twice."""
    assert RouterSettings().choose_options == ChooseOptions()


def test_an_escape_without_room_to_look_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and escape contradict each other below two looks."""
    monkeypatch.setenv("DUALMAP_ROUTER__LOOKS", "1")

    with pytest.raises(ValidationError, match=r"router\.looks must be at least 2"):
        Settings()
