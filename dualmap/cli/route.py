"""`dualmap route`: one request from the shell; where it goes, and with --run how it went.

A route that is not run is given back, so that trying out leaves no booking behind.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import uuid
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from opentelemetry import trace
from rich.console import Console
from rich.table import Table

from dualmap.cli.addresses import ROUTERS, RoutersOption, addresses_of
from dualmap.cli.failures import failing_plainly, say
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
from dualmap.client import Completion, DualMapClient, Request, Route
from dualmap.runtime.telemetry import Telemetry, start_telemetry

JAEGER_URL = "http://127.0.0.1:16686"

_ROUTE_TIMEOUT_S = 2.0
_RUN_TIMEOUT_S = 60.0
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be done with a request; ``timeout_s`` bounds all of it."""

    request: Request
    run: bool
    keep: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of it. ``trace_id`` is empty where nobody traced, ``sampled`` says whether it was also recorded."""

    route: Route
    completion: Completion | None = None
    trace_id: str = ""
    sampled: bool = False


def route(
    *,
    routers: RoutersOption = ROUTERS,
    tokens: TokensOption = None,
    tokens_file: TokensFileOption = None,
    text: TextOption = None,
    hashes: HashesOption = None,
    caller_ids: CallerIdsOption = None,
    prompt_tokens: PromptTokensOption = 0,
    block_tokens: BlockTokensOption = 0,
    model: Annotated[str, typer.Option(help="Model; the router's first when absent.")] = "",
    lora: Annotated[str, typer.Option(help="LoRA adapter.")] = "",
    request_id: Annotated[str, typer.Option(help="Unique in the pool; made up when absent.")] = "",
    attempt: Annotated[int, typer.Option(min=1, help="From 1; a higher one is a new decision.")] = 1,
    slo_ms: Annotated[int, typer.Option(min=0, help="Time to first token wanted; 0: the pool's.")] = 0,
    priority: Annotated[int, typer.Option(min=-1, max=1, help="-1 low, 0 normal, 1 high.")] = 0,
    exclude: Annotated[str, typer.Option(help="Instances not to choose, comma-separated.")] = "",
    max_output_tokens: Annotated[int, typer.Option(min=0, help="Tokens the answer may have; 0: unknown.")] = 0,
    run: Annotated[bool, typer.Option("--run", help="Submit it too, with a retry on the backup.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the booking, as the ticket will be submitted.")] = False,
    with_trace: Annotated[bool, typer.Option("--trace", help="Print the trace id and a Jaeger link.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.01, max=3_600, help="Deadline of it all; 2 s, and 60 s with --run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Route one request."""
    with failing_plainly():
        addresses = addresses_of(routers, "--routers")
        options = PromptOptions(tokens, tokens_file, text, hashes, caller_ids, prompt_tokens, block_tokens)
        request = Request(
            request_id=request_id or f"cli-{uuid.uuid4().hex}",
            prompt=options.prompt(),
            attempt=attempt,
            model=model,
            lora=lora,
            max_output_tokens=max_output_tokens,
            ttft_slo_ms=slo_ms,
            priority=priority,
            exclude=tuple(filter(None, (part.strip() for part in exclude.split(",")))),
        )
        limit_s = timeout_s or (_RUN_TIMEOUT_S if run else _ROUTE_TIMEOUT_S)
        asked = _Asked(request, run, keep, limit_s)
        telemetry = start_telemetry("cli")
        try:
            answer = asyncio.run(_ask(addresses, asked, telemetry))
        finally:
            telemetry.shutdown()
        if as_json:
            sys.stdout.write(json.dumps(_json(answer, with_trace), indent=2) + "\n")
        else:
            _show(Console(), answer, with_trace)
        if with_trace and not answer.sampled:
            say(_why_no_trace(answer))


async def _ask(addresses: tuple[str, ...], asked: _Asked, telemetry: Telemetry) -> _Answer:
    tracer = telemetry.tracer("dualmap.cli") if telemetry.enabled else None
    async with DualMapClient(addresses, tracer=tracer) as client:
        if tracer is None:
            return await _answer(client, asked)
        with tracer.start_as_current_span("dualmap.cli.route") as span:
            return await _answer(client, asked, span.get_span_context())


async def _answer(client: DualMapClient, asked: _Asked, context: trace.SpanContext | None = None) -> _Answer:
    completion = None
    if asked.run:
        completion = await client.complete(asked.request, asked.timeout_s)
        found = completion.route
    else:
        found = await client.route(asked.request, asked.timeout_s)
        if not asked.keep:
            await client.release(found)
    if context is not None and context.is_valid:
        return _Answer(found, completion, f"{context.trace_id:032x}", context.trace_flags.sampled)
    trace_id, sampled = _parsed(found.traceparent)
    return _Answer(found, completion, trace_id, sampled)


def _parsed(traceparent: str) -> tuple[str, bool]:
    """Trace id and whether it is sampled, of a W3C traceparent; an empty id where there is none."""
    parts = traceparent.split("-")
    if len(parts) != 4:
        return "", False
    return parts[1], bool(int(parts[3], 16) & _SAMPLED)


def _trace_url(trace_id: str) -> str:
    return f"{os.environ.get('DUALMAP_JAEGER_URL', JAEGER_URL).rstrip('/')}/trace/{trace_id}"


def _why_no_trace(answer: _Answer) -> str:
    if answer.trace_id:
        return "the trace was not sampled, so nothing shows it; see OTEL_TRACES_SAMPLER"
    return "no trace: neither this command nor the router has OTEL_EXPORTER_OTLP_ENDPOINT"


def _show(console: Console, answer: _Answer, with_trace: bool) -> None:
    found = answer.route
    backup = found.backup
    rows = [
        ("request", f"{found.request_id}, attempt {found.attempt}"),
        ("instance", _place(found.instance.instance_id, found.instance.grpc_address, found.instance.http_address)),
        ("backup", _place(backup.instance_id, backup.grpc_address, backup.http_address) if backup else "none"),
        ("reason", found.reason),
        ("predicted TTFT", f"{found.predicted_ttft_ms:.0f} ms"),
        ("expected hit", f"{found.hit_tokens} tokens"),
        ("key", f"{found.key_blocks} blocks" if found.key_blocks else "none: no full block"),
        ("ring epoch", str(found.ring_epoch)),
        ("state age", f"{found.state_age_ms:.0f} ms" if found.state_age_ms >= 0 else "never heard"),
    ]
    if answer.completion is not None:
        rows += _run_rows(answer.completion)
    if with_trace and answer.trace_id:
        rows += [("trace", answer.trace_id)]
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    if with_trace and answer.trace_id:
        # Whole on one line, so that a terminal makes it a link.
        console.print(f"in Jaeger: {_trace_url(answer.trace_id)}", soft_wrap=True, highlight=False)


def _place(instance_id: str, grpc_address: str, http_address: str) -> str:
    return f"{instance_id}, gRPC {grpc_address}" + (f", HTTP {http_address}" if http_address else "")


def _run_rows(completion: Completion) -> list[tuple[str, str]]:
    done = completion.done
    rows = [
        ("ran at", f"{done.instance_id}, attempt {completion.attempt}, {done.handovers} hand-overs"),
        ("waited", f"{done.waited_ms:.0f} ms"),
        ("TTFT", f"{done.ttft_ms:.0f} ms"),
        ("total", f"{done.total_ms:.0f} ms"),
        ("hit", f"{done.hit_tokens} of {done.prompt_tokens} prompt tokens"),
        ("output", f"{done.output_tokens} tokens, {done.finish_reason or 'ended'}"),
    ]
    text = completion.data.decode(errors="replace").strip()
    return [*rows, ("answer", text)] if text else rows


def _json(answer: _Answer, with_trace: bool) -> dict[str, object]:
    found = answer.route
    said: dict[str, object] = {
        "request_id": found.request_id,
        "attempt": found.attempt,
        "instance": asdict(found.instance),
        "backup": asdict(found.backup) if found.backup else None,
        "reason": found.reason,
        "predicted_ttft_ms": found.predicted_ttft_ms,
        "hit_tokens": found.hit_tokens,
        "key_blocks": found.key_blocks,
        "ring_epoch": found.ring_epoch,
        "state_age_ms": found.state_age_ms,
        "ticket": base64.b64encode(found.ticket).decode("ascii"),
    }
    if answer.completion is not None:
        said["run"] = {
            **asdict(answer.completion.done),
            "attempt": answer.completion.attempt,
            "answer": answer.completion.data.decode(errors="replace"),
        }
    if with_trace:
        said["trace_id"] = answer.trace_id or None
        said["trace_url"] = _trace_url(answer.trace_id) if answer.trace_id else None
    return said
