"""An SGLang server without a GPU: its endpoints, metrics, load socket and KV events of a chosen version."""

from __future__ import annotations

import asyncio
import time
from typing import Self

from aiohttp import web

from dualmap.engines.fake_rank import FakeRank
from dualmap.engines.fake_server import FakeOptions, FakeServer, json_answer
from dualmap.engines.load_publisher import LoadPublisher
from dualmap.engines.openai_bodies import Ask
from dualmap.runtime.clock import Clock


class FakeSglang(FakeServer):
    """See `FakeOptions`."""

    def __init__(self, options: FakeOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        self.loads: list[LoadPublisher] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start the ranks, their load sockets, then serve."""
        await super().__aenter__()
        base = self._base(self.options.load_port)
        for number, rank in enumerate(self.ranks if base is not None else []):
            load = LoadPublisher(rank, number, self.kv_tokens, self.clock)
            load.open(self.options.host, base + number if base else 0)
            self.loads.append(load)
            self._tasks.append(asyncio.create_task(load.run(self._stop), name=f"load-{number}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        """End."""
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await super().__aexit__()

    def routes(self) -> list[web.RouteDef]:
        """SGLang's own."""
        routes = [
            web.get("/get_server_info", self._info),
            web.get("/server_info", self._info),
            web.get("/metrics", self._metrics),
            web.post("/flush_cache", self._flush),
            web.post("/v1/tokenize", self._tokenize),
        ]
        if self.wire.version >= (0, 5, 9):
            routes.append(web.get("/v1/loads", self._loads))
        return routes

    def rank_of(self, request: web.Request, ask: Ask) -> int | None:  # noqa: ARG002  (the other dialect's place)
        """From the body."""
        return ask.rank

    async def _flush(self, _request: web.Request) -> web.Response:
        for rank in self.ranks:
            rank.clear_cache()
        return web.Response()

    async def _info(self, _request: web.Request) -> web.Response:
        options = self.options
        info: dict[str, object] = {
            "version": self.version,
            "model_path": options.model,
            "served_model_name": options.model,
            "page_size": options.block_tokens,
            "dp_size": options.ranks,
            "max_running_requests": options.engine.max_running,
            "max_total_num_tokens": self.kv_tokens,
            "kv_events": self._kv_events(),
        }
        return json_answer(info)

    def _kv_events(self) -> dict[str, object] | None:
        publisher = self.ranks[0].publisher
        if publisher is None:
            return None
        block: dict[str, object] = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": publisher.port,
            "topic": publisher.options.topic,
            "block_size": self.options.block_tokens,
            "dp_size": self.options.ranks,
        }
        if publisher.replay_port:
            block["replay_endpoint_port_base"] = publisher.replay_port
        if self.loads:
            block |= {"load_endpoint_port_base": self.loads[0].port, "load_topic": "load"}
        return block

    async def _loads(self, _request: web.Request) -> web.Response:
        loads = [self._load_of(number, rank) for number, rank in enumerate(self.ranks)]
        return json_answer({"timestamp": time.time(), "dp_rank_count": len(loads), "loads": loads})

    def _load_of(self, number: int, rank: FakeRank) -> dict[str, float]:
        counters, model = rank.counters, rank.engine.model
        return {
            "dp_rank": number,
            "num_running_reqs": rank.running,
            "num_waiting_reqs": rank.waiting,
            "num_waiting_uncached_tokens": rank.waiting_uncached_tokens,
            "num_used_tokens": model.cache.used,
            "max_total_num_tokens": self.kv_tokens,
            "token_usage": model.kv_use,
            "gen_throughput": 0.0,
            "cache_hit_rate": counters.cached_tokens / max(1, counters.prompt_tokens),
            "total_prefill_uncached_tokens": counters.prefill_tokens,
            "total_prefill_busy_us": int(counters.prefill_busy_s * 1_000_000),
        }

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = [f"process_start_time_seconds {min(rank.started_at_s for rank in self.ranks)}"]
        page = self.options.block_tokens
        for number, rank in enumerate(self.ranks):
            labels = f'model_name="{self.options.model}",dp_rank="{number}"'
            load = self._load_of(number, rank)
            values: dict[str, float] = {
                "sglang:num_running_reqs": rank.running,
                "sglang:num_queue_reqs": rank.waiting,
                "sglang:token_usage": load["token_usage"],
                "sglang:cache_hit_rate": load["cache_hit_rate"],
                "sglang:prompt_tokens_total": rank.counters.prompt_tokens,
                "sglang:cached_tokens_total": rank.counters.cached_tokens,
            }
            if self.wire.version >= (0, 5, 23):
                capacity = {"page_size": page, "num_pages": self.kv_tokens // page}
                values |= {f"sglang:{name}": value for name, value in capacity.items()}
                values["sglang:max_total_num_tokens"] = self.kv_tokens
            lines += [f"{name}{{{labels}}} {value}" for name, value in values.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")
