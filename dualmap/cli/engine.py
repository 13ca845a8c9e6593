"""`dualmap engine`: a vLLM or SGLang server without a GPU, for trying the real adapters and for tests."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

import typer

from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import PrefillCost
from dualmap.engines.event_wire import DEFAULT_VERSIONS, parse_version
from dualmap.engines.fake_server import FakeOptions, FakeServer
from dualmap.engines.fake_sglang import FakeSglang
from dualmap.engines.fake_vllm import FakeVllm
from dualmap.runtime.lifetime import run_service
from dualmap.runtime.settings import is_loopback


def engine(  # noqa: PLR0917  (each is an option of the command)
    dialect: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose endpoints, metrics and events.")] = "vllm",
    version: Annotated[str, typer.Option(help="Version to speak as, like 0.25.0; empty: a recent one.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0: any free one.")] = 8000,
    kv_events_port: Annotated[int, typer.Option(min=-1, max=65535, help="0: any free one; -1: no events.")] = 5557,
    replay_port: Annotated[int, typer.Option(min=-1, max=65535, help="0: any free one; -1: no replay.")] = 5558,
    load_port: Annotated[int, typer.Option(min=-1, max=65535, help="SGLang's load socket; -1: none.")] = -1,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "default",
    lora: Annotated[list[str] | None, typer.Option(help="Name of a LoRA adapter; may be repeated.")] = None,
    block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of an engine block or page.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Data-parallel ranks; rank r publishes at port + r.")] = 1,
    kv_tokens: Annotated[int, typer.Option(min=128, help="KV cache of a rank, tokens.")] = 1_200_000,
    host_tier_tokens: Annotated[int, typer.Option(min=0, help="Host memory behind it, tokens.")] = 0,
    prefill_ms: Annotated[float, typer.Option(min=0, help="Time of any prefill beside its tokens.")] = 20.0,
    prefill_us_per_token: Annotated[float, typer.Option(min=0, help="Time per uncached token.")] = 160.0,
    decode_tokens_per_s: Annotated[float, typer.Option(min=0.1, help="Of one sequence alone.")] = 50.0,
    admin: Annotated[bool, typer.Option(help="Serve faults under /admin to loopback callers: for tests.")] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; one JSON line on stdout says where."""
    try:
        parse_version(version or DEFAULT_VERSIONS[dialect])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--version") from error
    options = FakeOptions(
        dialect=dialect,
        version=version,
        host=host,
        port=port,
        kv_events_port=_port(kv_events_port),
        replay_port=_port(replay_port),
        load_port=_port(load_port),
        model=model,
        loras=tuple(lora or ()),
        block_tokens=block_tokens,
        ranks=ranks,
        admin=admin,
        engine=EngineOptions(
            cost=PrefillCost(prefill_ms / 1e3, prefill_us_per_token / 1e6),
            kv_tokens=kv_tokens,
            host_tier_tokens=host_tier_tokens,
            decode_tokens_per_s=decode_tokens_per_s,
        ),
    )
    if admin and not is_loopback(host):
        raise typer.BadParameter("faults are served on loopback only", param_hint="--admin")
    server: FakeServer = FakeVllm(options) if dialect == "vllm" else FakeSglang(options)

    async def serve(stop: asyncio.Event) -> None:
        async with server:
            print(json.dumps(serving_line(server)), flush=True)
            await stop.wait()

    raise typer.Exit(run_service(serve))


def serving_line(server: FakeServer) -> dict[str, object]:
    """Where the server is, for parents that started it."""
    publisher = server.ranks[0].publisher
    return {
        "event": "serving",
        "port": server.port,
        "kv_events_port": publisher.port if publisher is not None else None,
        "replay_port": publisher.replay_port or None if publisher is not None else None,
        "load_port": server.loads[0].port if isinstance(server, FakeSglang) and server.loads else None,
        "dialect": server.wire.dialect,
        "version": server.version,
    }


def _port(port: int) -> int | None:
    return None if port < 0 else port
