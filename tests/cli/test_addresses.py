"""Addresses are checked before anything is asked."""

from __future__ import annotations

import pytest

from dualmap.cli.addresses import addresses_of, each_behind, ips_of
from dualmap.cli.failures import CommandError


def test_a_comma_list_gives_each_address_once() -> None:
    """Spaces and repeats do not matter; names and IPv6 are addresses too."""
    assert addresses_of("a:1, [::1]:7070,a:1,", "--routers") == ("a:1", "[::1]:7070")


@pytest.mark.parametrize("text", ["", " , ", "host", "host:0", "host:65536", "http://host:1", ":7070", "a b:1"])
def test_what_is_no_address_is_refused_with_its_option(text: str) -> None:
    """The line says which option, and what an address looks like."""
    with pytest.raises(CommandError, match=r"--routers: .*host:port"):
        addresses_of(text, "--routers")


def test_a_name_of_several_processes_becomes_each_of_them() -> None:
    """One process or none known: the name stays, and says more than a number."""
    known = {"rebalancer": ["10.0.0.3", "10.0.0.2"], "router-1": ["10.0.0.9"], "localhost": ["127.0.0.1"]}
    asked = ("rebalancer:7073", "router-1:7070", "localhost:1", "gone:2", "[::1]:3")

    found = each_behind(asked, lambda host: known.get(host, []))

    assert found == ("10.0.0.2:7073", "10.0.0.3:7073", *asked[1:])


def test_an_unknown_name_has_no_address() -> None:
    """The call to it will say so."""
    assert not ips_of("a..b")
