"""Addresses are checked before anything is asked."""

from __future__ import annotations

import pytest

from dualmap.cli.addresses import addresses_of
from dualmap.cli.failures import CommandError


def test_a_comma_list_gives_each_address_once() -> None:
    """Spaces and repeats do not matter; names and IPv6 are addresses too."""
    assert addresses_of("a:1, [::1]:7070,a:1,", "--routers") == ("a:1", "[::1]:7070")


@pytest.mark.parametrize("text", ["", " , ", "host", "host:0", "host:65536", "http://host:1", ":7070", "a b:1"])
def test_what_is_no_address_is_refused_with_its_option(text: str) -> None:
    """The line says which option, and what an address looks like."""
    with pytest.raises(CommandError, match=r"--routers: .*host:port"):
        addresses_of(text, "--routers")
