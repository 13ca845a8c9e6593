"""Options that the `dualmap simulate` commands share, and the cluster they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, get_args

import typer

from dualmap.core.choose import ChooseOptions, Select
from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import QueuePolicy
from dualmap.simulator.options import (
    AS_BUILT,
    COST_7B,
    COST_14B,
    EXACT,
    ClusterOptions,
    ControlOptions,
    Happening,
    TimetableEntry,
    simulated_engine,
)
from dualmap.simulator.registry import CEILINGS, PEERS, POLICIES
from dualmap.simulator.study import ContradictionError


class Binding(StrEnum):
    """When a request is bound to its instance."""

    EARLY = "early"
    LATE = "late"


class Model(StrEnum):
    """Prefill costs the paper measured."""

    SEVEN = "7b"
    FOURTEEN = "14b"


class Rule(StrEnum):
    """`ChooseOptions.select`."""

    DUALMAP = "dualmap"
    CACHE_FIRST = "cache_first"
    MIN_TTFT = "min_ttft"
    CACHE = "cache"
    LOAD = "load"


class Order(StrEnum):
    """Queue order for every policy."""

    SLO = "slo"
    HIT_FIRST = "hit_first"
    FIFO = "fifo"


TracePath = Annotated[str | None, typer.Option("--trace", help="Mooncake JSONL, Azure CSV or sessions; gzip or plain.")]
Synthetic = Annotated[str | None, typer.Option(help="Made-up workload instead of a trace: skew, bursts or chat.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Requests taken, warm-up included.")]
MaxInput = Annotated[int, typer.Option(min=1, help="Longest prompt, tokens.")]
OverLongOption = Annotated[str, typer.Option(help="A longer prompt is cut, or its request skipped: cut or skip.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave wrong lines of the trace out, and count them.")]
Warmup = Annotated[int, typer.Option(min=0, help="First requests that are not counted.")]
Policies = Annotated[str, typer.Option(help="Policies, comma separated: " + ", ".join((*POLICIES, *PEERS)) + ".")]
Instances = Annotated[int, typer.Option(min=1, max=1024, help="Instances at the start.")]
Slo = Annotated[float, typer.Option(min=0.001, help="TTFT objective, seconds.")]
ModelOption = Annotated[Model, typer.Option(help="Prefill cost: 7b 0.16 ms/token, 14b 0.127; both 20 ms a prefill.")]
QueueOption = Annotated[Order | None, typer.Option(help="One queue order for all policies; absent: each its own.")]
BindingOption = Annotated[Binding, typer.Option(help="late: a backup may pull what its holder has given up.")]
RebalanceOption = Annotated[bool, typer.Option("--rebalance/--no-rebalance", help="Whether the rebalancer works.")]
SelectOption = Annotated[Rule, typer.Option(help="Rule inside the candidates.")]
Choices = Annotated[int, typer.Option(min=1, max=4, help="Full candidates of a key; 2 is the pair.")]
Heat = Annotated[bool, typer.Option("--heat/--no-heat", help="Whether hot keys are lengthened.")]
Escape = Annotated[bool, typer.Option("--escape/--no-escape", help="Whether others than the pair are looked at.")]
AsBuilt = Annotated[bool, typer.Option("--as-built", help="100 ms polls, 3 ms messages, two routers, fitted costs.")]
PollMs = Annotated[float | None, typer.Option(min=0, help="Age of state: poll period in ms; 0 is exact.")]
MessageMs = Annotated[float | None, typer.Option(min=0, help="Delay of every message, ms.")]
Routers = Annotated[int | None, typer.Option(min=1, max=64, help="Routers, each with its own view and bookings.")]
Bookings = Annotated[
    bool, typer.Option("--bookings/--no-bookings", help="Whether a router counts what it sent itself.")
]
FitCost = Annotated[bool, typer.Option("--fit-cost", help="Instances learn their cost; --as-built has it.")]
SlowdownTerm = Annotated[
    bool,
    typer.Option("--slowdown-term/--no-slowdown-term", help="Learnt costs know what decodes beside a prefill add."),
]
StartDepth = Annotated[int, typer.Option(min=1, max=64, help="Blocks of a key before heat lengthens it.")]
RebalanceMs = Annotated[float | None, typer.Option(min=1, help="Period of the rebalancer; 250 ms unless told.")]
HeatMs = Annotated[float | None, typer.Option(min=1, help="Period of heat samples; 1,000 ms unless told.")]
KvTokens = Annotated[int, typer.Option(min=1, help="KV cache of an instance, tokens.")]
HostTokens = Annotated[int, typer.Option(min=0, help="Slower second tier that takes what the cache evicts; 0: none.")]
HostLoadUs = Annotated[float | None, typer.Option(min=0, help="Loading a token from that tier, microseconds; 20.")]
Speeds = Annotated[str, typer.Option(help="Relative speed of each instance, by comma; 1 where the list ends.")]
DecodeRate = Annotated[float, typer.Option(min=0.1, help="Tokens a second of one sequence decoding alone.")]
DecodeSlowdown = Annotated[float, typer.Option(min=0, help="What each other sequence adds to the time of a token.")]
PrefillSlowdown = Annotated[float, typer.Option(min=0, help="What each decoding sequence adds to a prefill's time.")]
Timetable = Annotated[str, typer.Option(help="SECONDS:join|drain|fail|restart|stall:INSTANCE[:DURATION], by comma.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes; 0: as many as cores.")]
JsonOut = Annotated[str | None, typer.Option("--json", help="Write the results there as JSON.")]


def policy_names(listed: str) -> list[str]:
    """The policies asked for, each known."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES and name not in PEERS:
            raise ContradictionError(f"--policies: {name!r} is none of {', '.join((*POLICIES, *PEERS))}")
    if not names:
        raise ContradictionError("--policies: none given")
    return names


@dataclass(frozen=True, slots=True)
class Periods:
    """Ages, delays and periods as given; None: not given."""

    poll_ms: float | None = None
    message_ms: float | None = None
    routers: int | None = None
    rebalance_ms: float | None = None
    heat_ms: float | None = None


def control(  # noqa: PLR0917 - the commands' options
    as_built: bool, given: Periods, rebalance: bool, heat: bool, bookings: bool, fit_cost: bool
) -> ControlOptions:
    """The control plane asked for."""
    plane = {"--poll-ms": given.poll_ms, "--message-ms": given.message_ms, "--routers": given.routers}
    if as_built and any(value is not None for value in plane.values()):
        named = ", ".join(name for name, value in plane.items() if value is not None)
        raise ContradictionError(f"--as-built sets {named} itself: give one or the other")
    for name, period, wanted in (("rebalance", given.rebalance_ms, rebalance), ("heat", given.heat_ms, heat)):
        if period is not None and not wanted:
            raise ContradictionError(f"--no-{name} and --{name}-ms: give one or the other")
    base = AS_BUILT if as_built else EXACT
    changes: dict[str, float] = {}
    if given.poll_ms is not None:
        changes["poll_s"] = given.poll_ms / 1_000
    if given.message_ms is not None:
        changes["message_s"] = given.message_ms / 1_000
    if given.routers is not None:
        if given.routers > 1 and not given.poll_ms:
            raise ContradictionError("--routers above 1 needs --poll-ms: with exact state they would share one view")
        changes["routers"] = given.routers
    changes["rebalance_s"] = (given.rebalance_ms or base.rebalance_s * 1_000) / 1_000 if rebalance else 0.0
    changes["heat_s"] = (given.heat_ms or base.heat_s * 1_000) / 1_000 if heat else 0.0
    return replace(base, bookings=bookings, fit_cost=base.fit_cost or fit_cost, **changes)  # type: ignore[arg-type]


def learning(controls: ControlOptions, slowdown_term: bool, start_depth: int) -> ControlOptions:
    """The same with what instances learn and where keys start."""
    if not slowdown_term and not controls.fit_cost:
        raise ContradictionError(
            "--no-slowdown-term needs --fit-cost or --as-built: a cost that is told has no such term"
        )
    return replace(controls, slowdown_term=slowdown_term, start_depth=start_depth)


def engine(  # noqa: PLR0917 - the commands' options
    model: Model,
    kv_tokens: int,
    host_tokens: int,
    host_load_us: float | None,
    decode_rate: float,
    decode_slowdown: float,
    prefill_slowdown: float,
) -> EngineOptions:
    """The engine of every instance."""
    if host_load_us is not None and not host_tokens:
        raise ContradictionError("--host-load-us needs --host-tokens: there is no second tier to load from")
    return simulated_engine(
        COST_14B if model is Model.FOURTEEN else COST_7B,
        kv_tokens=kv_tokens,
        host_tier_tokens=host_tokens,
        host_load_s_per_token=(20.0 if host_load_us is None else host_load_us) / 1e6,
        decode_tokens_per_s=decode_rate,
        decode_batch_slowdown=decode_slowdown,
        prefill_slowdown_per_running=prefill_slowdown,
    )


def speeds(listed: str, instances: int) -> tuple[float, ...]:
    """The relative speeds asked for, each positive."""
    try:
        found = tuple(float(part) for part in listed.split(",") if part.strip())
    except ValueError:
        raise ContradictionError(f"--speeds: {listed!r} holds something that is no number") from None
    if any(not 0 < speed < float("inf") for speed in found):
        raise ContradictionError(f"--speeds: {listed!r} holds something that is not positive")
    if len(found) > instances:
        raise ContradictionError(f"--speeds names {len(found)} instances, --instances {instances}")
    return found


def check_choosing(names: Sequence[str], select: Rule, choices: int, escape: bool) -> None:
    """Refuse parts switched off of a policy that is not run."""
    given = {"--select": select is not Rule.DUALMAP, "--choices": choices != 2, "--no-escape": not escape}
    named = [name for name, changed in given.items() if changed]
    if named and "dualmap" not in names:
        raise ContradictionError(f"{', '.join(named)}: dualmap is not among --policies, nothing else has it")


def timetable(text: str) -> list[TimetableEntry]:
    """The timetable asked for."""
    return [_entry(piece.strip()) for piece in text.split(",") if piece.strip()]


def check_timetable(names: Sequence[str], happenings: Sequence[TimetableEntry], instances: int) -> None:
    """Refuse what somebody cannot be told, and instances that are not there or there already."""
    for name in names:
        if name in PEERS and any(entry.happening != "stall" for entry in happenings):
            raise ContradictionError(f"--policies {name} and --timetable: it is told of stalls only")
        if name in CEILINGS and any(entry.happening not in {"stall", "join"} for entry in happenings):
            raise ContradictionError(
                f"--policies {name} and --timetable: one central queue has nowhere to move work to"
            )
    there = set(range(instances))
    for entry in sorted(happenings, key=lambda one: one.at_s):
        if entry.at_s < 0 or entry.instance < 0:
            raise ContradictionError(f"--timetable: {entry.at_s:g}:{entry.happening}:{entry.instance} is negative")
        if (entry.happening == "join") == (entry.instance in there):
            known = "is there already" if entry.happening == "join" else "is not there by then"
            raise ContradictionError(f"--timetable and --instances: instance {entry.instance} {known}")
        there.add(entry.instance)


def _entry(part: str) -> TimetableEntry:
    fields = part.split(":")
    if len(fields) not in (3, 4) or fields[1] not in get_args(Happening):
        raise ContradictionError(f"--timetable: {part!r} is not SECONDS:WHAT:INSTANCE[:DURATION]")
    happening: Happening = fields[1]  # type: ignore[assignment]
    try:
        duration_s = float(fields[3]) if len(fields) == 4 else 0.0
        entry = TimetableEntry(float(fields[0]), happening, int(fields[2]), duration_s)
    except ValueError:
        raise ContradictionError(f"--timetable: {part!r} holds something that is no number") from None
    if (happening == "stall") != (duration_s > 0):
        raise ContradictionError(f"--timetable: {part!r}: a stall needs a duration, nothing else has one")
    return entry


def choosing(select: Rule, choices: int, escape: bool) -> ChooseOptions:
    """The decision's options."""
    published = select is not Rule.DUALMAP
    fraction = 0.7 if published else ChooseOptions().escape_slo_fraction
    rule: Select = select.value
    return ChooseOptions(select=rule, choices=choices, escape=escape, escape_slo_fraction=fraction)


def cluster(  # noqa: PLR0917 - the commands' options
    instances: int, slo_s: float, built: EngineOptions, queue: Order | None, binding: Binding, controls: ControlOptions
) -> ClusterOptions:
    """The cluster asked for, its decision options still the defaults."""
    return ClusterOptions(
        instances=instances,
        ttft_slo_s=slo_s,
        engine=built,
        queue=QueuePolicy[queue.name] if queue is not None else None,
        binding="late" if binding is Binding.LATE else "early",
        control=controls,
    )
