"""Where the services of a running system are: options and variables, checked before anything is asked."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from dualmap.cli.failures import CommandError

ROUTERS = "127.0.0.1:7070"
RING_MANAGERS = "127.0.0.1:7071"
COLLECTORS = "127.0.0.1:7072"
REBALANCERS = "127.0.0.1:7073"

RoutersOption = Annotated[
    str, typer.Option("--routers", "--router", envvar="DUALMAP_ROUTERS", help="Routers, host:port, comma-separated.")
]
RingManagersOption = Annotated[
    str, typer.Option(envvar="DUALMAP_RING_MANAGERS", help="Ring managers, host:port, comma-separated.")
]
CollectorsOption = Annotated[
    str, typer.Option(envvar="DUALMAP_COLLECTORS", help="State collectors, host:port, comma-separated.")
]
RebalancersOption = Annotated[
    str, typer.Option(envvar="DUALMAP_REBALANCERS", help="Rebalancers, host:port, comma-separated.")
]
PoolOption = Annotated[str, typer.Option(envvar="DUALMAP_POOL__NAME", help="Pool; the services' own when absent.")]
TimeoutOption = Annotated[float, typer.Option("--timeout-s", min=0.01, max=3_600, help="Deadline of a call, seconds.")]

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def addresses_of(text: str, option: str) -> tuple[str, ...]:
    """The addresses of a comma list, each once. Raises CommandError for none, or for one that is not host:port."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise CommandError(f"{option}: at least one address is needed, as host:port")
    for address in found:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 1 <= int(match["port"]) <= 65_535:
            raise CommandError(f"{option}: {address!r} is no address; give host:port, such as 127.0.0.1:7070")
    return found


def ips_of(host: str) -> Sequence[str]:
    """The IPv4 addresses that a name stands for; none where it is not known, which the call itself will say."""
    try:
        return socket.gethostbyname_ex(host)[2]
    except (OSError, UnicodeError):
        return ()


def each_behind(addresses: Sequence[str], lookup: Callable[[str], Sequence[str]] = ips_of) -> tuple[str, ...]:
    """The same, but a name of several processes (scaled containers) becomes the address of each; blocks on DNS."""
    found: list[str] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        ips = sorted(set(lookup(host))) if not host.startswith("[") else ()
        found += [f"{ip}:{port}" for ip in ips] if len(ips) > 1 else [address]
    return tuple(dict.fromkeys(found))
