"""docs/settings.md is what the models have, and every setting says what it is for."""

from __future__ import annotations

import pytest

from tests.deploy.settings_page import PAGE, page, rows_of

_SERVICES = ("router", "ringmanager", "statecollector", "rebalancer", "instanceagent")


def test_the_page_is_what_the_models_have() -> None:
    """`make settings` was run after the last change of a setting."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run 'make settings' and commit docs/settings.md"


@pytest.mark.parametrize("service", _SERVICES)
def test_every_setting_is_described(service: str) -> None:
    """With its reason."""
    rows = rows_of(service)

    assert len(rows) > 20
    assert [variable for variable, _, _, description in rows if not description] == []


@pytest.mark.parametrize("service", _SERVICES)
def test_no_secret_has_a_default_in_the_page(service: str) -> None:
    """The page shows that there is none."""
    shown = {variable: default for variable, default, _, _ in rows_of(service)}

    assert shown["DUALMAP_POOL__HASH_KEY"] == "empty"
