"""`dualmap ring show|splits|drain|undrain`: the ring as its managers know it, and the two changes operators make."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from time import monotonic
from typing import Annotated, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dualmap.cli.addresses import RING_MANAGERS, PoolOption, RingManagersOption, TimeoutOption, addresses_of
from dualmap.cli.failures import CommandError, failing_plainly, plain, say
from dualmap.core.membership import InstanceState, Member
from dualmap.rpc.convert_operator import DrainOutcome, RingFacts
from dualmap.rpc.operator_calls import RingOperatorCalls
from dualmap.rpc.route_calls import CallFailed

V = TypeVar("V")
Ask = Callable[[RingOperatorCalls], Awaitable[V]]

InstanceArgument = Annotated[str, typer.Argument(help="Instance id, such as agent-1/0.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object for programs.")]

_WAIT_TURN_S = 0.1

app = typer.Typer(help="The ring: who is on it, and drains.", no_args_is_help=True)


@app.command()
def show(
    ring_managers: RingManagersOption = RING_MANAGERS,
    pool: PoolOption = "",
    timeout_s: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show epoch, parameters, leader and members."""
    with failing_plainly():
        addresses = addresses_of(ring_managers, "--ring-managers")
        known = asyncio.run(_ask_all(addresses, pool, timeout_s))
        newest = _newest(known)
        if as_json:
            sys.stdout.write(json.dumps(_ring_json(newest, known), indent=2) + "\n")
        else:
            _show(Console(), newest, known)


@app.command()
def splits(
    ring_managers: RingManagersOption = RING_MANAGERS,
    pool: PoolOption = "",
    timeout_s: TimeoutOption = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Show the split table: prefixes too hot for one pair."""
    with failing_plainly():
        addresses = addresses_of(ring_managers, "--ring-managers")
        ring = _newest(asyncio.run(_ask_all(addresses, pool, timeout_s))).ring
        rows = sorted(ring.splits, key=lambda split: (split.depth, split.prefix))
        if as_json:
            found = [{**asdict(split), "prefix": f"{split.prefix:016x}"} for split in rows]
            sys.stdout.write(json.dumps({"epoch": ring.epoch, "splits": found}, indent=2) + "\n")
            return
        table = Table(
            box=box.SIMPLE_HEAD,
            title=f"split table of pool {ring.pool} at epoch {ring.epoch}",
            caption=f"{len(rows)} prefixes",
        )
        table.add_column("prefix")
        table.add_column("depth, blocks", justify="right")
        table.add_column("key goes on to, blocks", justify="right")
        for split in rows:
            table.add_row(f"{split.prefix:016x}", str(split.depth), str(split.next_depth))
        Console().print(table)


@app.command()
def drain(
    instance_id: InstanceArgument,
    ring_managers: RingManagersOption = RING_MANAGERS,
    pool: PoolOption = "",
    timeout_s: TimeoutOption = 5.0,
    wait_s: Annotated[float, typer.Option(min=0, help="Wait so long, seconds, until it has left.")] = 0.0,
) -> None:
    """Stop new work for an instance; its agent hands the queue over and leaves."""
    with failing_plainly():
        addresses = addresses_of(ring_managers, "--ring-managers")
        outcome = asyncio.run(_at_leader(addresses, pool, lambda calls: calls.drain(instance_id, timeout_s)))
        sys.stdout.write(f"{instance_id}: {_said(outcome)}; {outcome.moved_share:.1%} of pairs change once it left\n")
        if wait_s:
            asyncio.run(_until_left(addresses, pool, instance_id, timeout_s, wait_s))
            sys.stdout.write(f"{instance_id}: has left\n")


@app.command()
def undrain(
    instance_id: InstanceArgument,
    ring_managers: RingManagersOption = RING_MANAGERS,
    pool: PoolOption = "",
    timeout_s: TimeoutOption = 5.0,
) -> None:
    """Take a drain back."""
    with failing_plainly():
        addresses = addresses_of(ring_managers, "--ring-managers")
        outcome = asyncio.run(_at_leader(addresses, pool, lambda calls: calls.undrain(instance_id, timeout_s)))
        sys.stdout.write(f"{instance_id}: {_said(outcome)}\n")


async def _at_leader(addresses: tuple[str, ...], pool: str, ask: Ask[DrainOutcome]) -> DrainOutcome:
    """The leader's answer; standbys, and those that do not answer, are passed over. Raises CallFailed."""
    failures: list[CallFailed] = []
    for address in addresses:
        async with RingOperatorCalls(address, pool) as calls:
            try:
                return await ask(calls)
            except CallFailed as error:
                if error.code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    raise
                failures.append(error)
    # A standby that knows its leader tells more than one that is not there.
    raise next((error for error in failures if error.reason), failures[-1])


async def _ask_all(addresses: tuple[str, ...], pool: str, timeout_s: float) -> dict[str, RingFacts | CallFailed]:
    async def one(address: str) -> RingFacts | CallFailed:
        async with RingOperatorCalls(address, pool) as calls:
            try:
                return await calls.ring(timeout_s)
            except CallFailed as error:
                return error

    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


def _newest(known: dict[str, RingFacts | CallFailed]) -> RingFacts:
    """The leader's ring, else the newest. Says who did not answer; raises CallFailed when nobody did."""
    rings = [facts for facts in known.values() if isinstance(facts, RingFacts)]
    failures = [facts for facts in known.values() if isinstance(facts, CallFailed)]
    if not rings:
        raise failures[0]
    for failure in failures:
        say(plain(failure))
    return max(rings, key=lambda facts: (facts.leader, facts.ring.epoch))


async def _until_left(addresses: tuple[str, ...], pool: str, instance_id: str, timeout_s: float, wait_s: float) -> None:
    deadline_s = monotonic() + wait_s
    while True:
        known = await _ask_all(addresses, pool, timeout_s)
        rings = [facts for facts in known.values() if isinstance(facts, RingFacts)]
        member = _member(max(rings, key=lambda f: (f.leader, f.ring.epoch)), instance_id) if rings else None
        if rings and (member is None or member.state is InstanceState.LEFT):
            return
        if member is not None and member.state is not InstanceState.DRAINING:
            raise CommandError(f"{instance_id} is {member.state.name}: its drain was taken back")
        if monotonic() >= deadline_s:
            raise CommandError(f"{instance_id} still drains after {wait_s:g} s")
        await asyncio.sleep(_WAIT_TURN_S)


def _member(facts: RingFacts, instance_id: str) -> Member | None:
    return next((member for member in facts.ring.members if member.instance_id == instance_id), None)


def _said(outcome: DrainOutcome) -> str:
    return f"{outcome.state.name} at epoch {outcome.ring_epoch}"


def _show(console: Console, facts: RingFacts, known: dict[str, RingFacts | CallFailed]) -> None:
    ring, parameters = facts.ring, facts.ring.parameters
    grace_s = ring.previous.grace_left_ms / 1000 if ring.previous is not None else 0.0
    managers = ", ".join(f"{address} ({_role(found)})" for address, found in known.items())
    for name, value in (
        ("pool", f"{ring.pool}, epoch {ring.epoch}, default TTFT SLO {ring.default_ttft_slo_ms} ms"),
        ("hashing", f"blocks of {parameters.block_tokens} tokens, hash version {parameters.hash_version}"),
        ("keys", f"start depth {parameters.start_depth} blocks, {len(ring.splits)} split prefixes"),
        ("rings", f"{parameters.virtual_nodes} virtual nodes, seeds {parameters.seed_1} and {parameters.seed_2}"),
        ("last change", f"moved {facts.last_moved_share:.1%} of pairs, grace period {grace_s:.1f} s more"),
        ("managers", managers),
    ):
        console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1))
    for name in ("instance", "state", "weight", "role", "gRPC", "HTTP"):
        table.add_column(name, overflow="fold")
    for member in sorted(ring.members, key=lambda member: member.instance_id):
        table.add_row(
            member.instance_id,
            member.state.name,
            f"{member.weight:g}",
            member.role,
            member.grpc_address,
            member.http_address or "-",
        )
    console.print(table)


def _role(found: RingFacts | CallFailed) -> str:
    if isinstance(found, CallFailed):
        return "no answer"
    return "leader" if found.leader else "standby"


def _ring_json(facts: RingFacts, known: dict[str, RingFacts | CallFailed]) -> dict[str, object]:
    ring = facts.ring
    return {
        "pool": ring.pool,
        "epoch": ring.epoch,
        "parameters": asdict(ring.parameters),
        "default_ttft_slo_ms": ring.default_ttft_slo_ms,
        "last_moved_share": facts.last_moved_share,
        "grace_left_ms": ring.previous.grace_left_ms if ring.previous else 0,
        "splits": len(ring.splits),
        "leader": next((a for a, found in known.items() if isinstance(found, RingFacts) and found.leader), None),
        "members": [{**asdict(member), "state": member.state.name} for member in ring.members],
    }
