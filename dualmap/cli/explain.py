"""`dualmap explain`: both candidates and why, from every router: for a recent request, or for a prompt never routed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dualmap.cli.addresses import ROUTERS, RoutersOption, TimeoutOption, addresses_of
from dualmap.cli.failures import CommandError, failing_plainly, plain, say
from dualmap.cli.prompt_options import (
    BlockTokensOption,
    CallerIdsOption,
    HashesOption,
    PromptOptions,
    PromptTokensOption,
    TextOption,
    TokensFileOption,
    TokensOption,
)
from dualmap.core.choose import Candidate
from dualmap.rpc.convert_operator import Explanation
from dualmap.rpc.operator_calls import RouterOperatorCalls
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.route_values import Request

Ask = Callable[[RouterOperatorCalls], Awaitable[Explanation]]
Answers = dict[str, Explanation | CallFailed]

_ROWS: tuple[tuple[str, Callable[[Candidate], str]], ...] = (
    ("role", lambda one: one.role),
    ("hit, tokens", lambda one: str(one.hit_tokens)),
    ("  of it only booked", lambda one: str(one.hit_tokens - one.indexed_hit_tokens)),
    ("miss, tokens", lambda one: str(one.miss_tokens)),
    ("work ahead, s", lambda one: f"{one.work_ahead_s:.3f}"),
    ("  of it only booked", lambda one: f"{one.booked_s:.3f}"),
    ("prefill, s", lambda one: f"{one.prefill_s:.3f}"),
    ("predicted TTFT, ms", lambda one: f"{one.predicted_ttft_s * 1000:.0f}"),
    ("state age, ms", lambda one: f"{one.state_age_ms:.0f}" if one.state_age_ms >= 0 else "never heard"),
    ("admits", lambda one: "yes" if one.admitting else "no: full"),
)


def explain(
    request_id: Annotated[str | None, typer.Argument(help="A request routed lately.")] = None,
    *,
    routers: RoutersOption = ROUTERS,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    text: TextOption = None,
    hashes: HashesOption = None,
    caller_ids: CallerIdsOption = None,
    prompt_tokens: PromptTokensOption = 0,
    block_tokens: BlockTokensOption = 0,
    model: Annotated[str, typer.Option(help="Model; the routers' first when absent.")] = "",
    lora: Annotated[str, typer.Option(help="LoRA adapter.")] = "",
    slo_ms: Annotated[int, typer.Option(min=0, help="Time to first token wanted; 0: the pool's.")] = 0,
    timeout_s: TimeoutOption = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Ask all routers why a request went where it went, or where a prompt would go; nothing is booked."""
    with failing_plainly():
        options = PromptOptions(tokens, tokens_file, text, hashes, caller_ids, prompt_tokens, block_tokens)
        if (request_id is None) == (options.given == 0):
            raise CommandError("give either a request id or a prompt", exit_code=2)
        addresses = addresses_of(routers, "--routers")
        if request_id is not None:
            answers = asyncio.run(_ask_all(addresses, _recent(request_id, timeout_s)))
        else:
            request = Request("", options.prompt(), model=model, lora=lora, ttft_slo_ms=slo_ms)
            answers = asyncio.run(_ask_all(addresses, lambda calls: calls.what_if(request, timeout_s)))
        found = _found(answers, request_id)
        if as_json:
            said = {"routers": {address: _explanation_json(said) for address, said in found.items()}}
            sys.stdout.write(json.dumps(said, indent=2) + "\n")
        else:
            _show(Console(), found)


def _recent(request_id: str, timeout_s: float) -> Ask:
    return lambda calls: calls.explain(request_id, timeout_s)


async def _ask_all(addresses: tuple[str, ...], ask: Ask) -> Answers:
    async def one(address: str) -> Explanation | CallFailed:
        async with RouterOperatorCalls(address) as calls:
            try:
                return await ask(calls)
            except CallFailed as error:
                return error

    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


def _found(answers: Answers, request_id: str | None) -> dict[str, Explanation]:
    """What routers explained; who could not is said. Raises CommandError or CallFailed when nobody could."""
    found = {address: answer for address, answer in answers.items() if isinstance(answer, Explanation)}
    failures = [answer for answer in answers.values() if isinstance(answer, CallFailed)]
    unknown = [failure for failure in failures if request_id is not None and failure.reason == "NOT_FOUND"]
    others = [failure for failure in failures if failure not in unknown]
    if not found and others:
        raise others[0]
    if not found:
        asked = ", ".join(answers)
        raise CommandError(f"no router remembers request {request_id!r} (each keeps its last 10,000); asked {asked}")
    for failure in others:
        say(plain(failure))
    return found


def _show(console: Console, found: dict[str, Explanation]) -> None:
    for address, explanation in found.items():
        _show_one(console, address, explanation)
    if len(found) > 1 and not any(said.request_id for said in found.values()):
        console.print(_agreement(found))


def _show_one(console: Console, address: str, said: Explanation) -> None:
    what = f"request {said.request_id}, attempt {said.attempt}" if said.request_id else "what if"
    when = f", {said.decided_ago_ms / 1000:.1f} s ago" if said.decided_ago_ms else ""
    console.print(f"{what}, router {address}{when}", style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True)
    for candidate in said.candidates:
        chosen = candidate.instance_id == said.chosen
        style = "bold green" if chosen else None
        table.add_column(f"{candidate.instance_id}{' *' if chosen else ''}", justify="right", style=style)
    for name, cell in _ROWS:
        table.add_row(name, *map(cell, said.candidates))
    console.print(table)
    console.print(f"* {said.chosen or 'nobody'} by {said.reason}: {said.rule}", highlight=False, soft_wrap=True)
    console.print(
        f"  {_key(said)}, {said.prompt_tokens} prompt tokens, TTFT SLO {said.ttft_slo_ms:g} ms, "
        f"ring epoch {said.ring_epoch}\n",
        highlight=False,
        soft_wrap=True,
    )


def _key(said: Explanation) -> str:
    return f"key {said.key:016x} over {said.key_blocks} blocks" if said.key_blocks else "no full block, so no key"


def _pair(said: Explanation) -> tuple[str, ...]:
    return tuple(c.instance_id for c in said.candidates if c.role in ("pair_1", "pair_2"))


def _agreement(found: dict[str, Explanation]) -> str:
    pairs = {_pair(said) for said in found.values()}
    chosen = {said.chosen for said in found.values()}
    if len(pairs) == 1 and len(chosen) == 1:
        return f"all {len(found)} routers see the same pair and choose {chosen.pop()}"
    if len(pairs) == 1:
        return "all routers see the same pair; their choices differ by what each has booked or heard"
    epochs = {said.ring_epoch for said in found.values()}
    cause = "their ring epochs differ" if len(epochs) > 1 else "one skips an instance the other takes for eligible"
    return f"the routers see different pairs: {cause}"


def _explanation_json(said: Explanation) -> dict[str, object]:
    return {
        "router_id": f"{said.router_id:016x}",
        "request_id": said.request_id,
        "attempt": said.attempt,
        "reason": said.reason,
        "rule": said.rule,
        "key": f"{said.key:016x}",
        "key_blocks": said.key_blocks,
        "prompt_tokens": said.prompt_tokens,
        "ttft_slo_ms": said.ttft_slo_ms,
        "ring_epoch": said.ring_epoch,
        "decided_ago_ms": said.decided_ago_ms,
        "chosen": said.chosen,
        "candidates": [candidate._asdict() for candidate in said.candidates],
    }
