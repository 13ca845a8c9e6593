"""A vLLM server without a GPU: its endpoints, metrics and KV events of a chosen version over the engine model."""

from __future__ import annotations

from aiohttp import web

from dualmap.engines.fake_rank import FakeRank
from dualmap.engines.fake_server import FakeServer, json_answer
from dualmap.engines.openai_bodies import Ask, BadBody

RANK_HEADER = "X-data-parallel-rank"


class FakeVllm(FakeServer):
    """See `FakeOptions`."""

    def routes(self) -> list[web.RouteDef]:
        """The endpoints that only vLLM has."""
        routes = [
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/load", self._load),
            web.post("/reset_prefix_cache", self._reset),
        ]
        if self.wire.version >= (0, 32):
            routes.append(web.get("/kv_event_sources", self._sources))
        return routes

    def rank_of(self, request: web.Request, ask: Ask) -> int | None:  # noqa: ARG002  (the other dialect's place)
        """From the header."""
        named = request.headers.get(RANK_HEADER)
        if named is None:
            return None
        if not named.isdigit():
            raise BadBody(f"{RANK_HEADER} must be a number")
        return int(named)

    async def _version(self, _request: web.Request) -> web.Response:
        return json_answer({"version": self.version})

    async def _load(self, _request: web.Request) -> web.Response:
        return json_answer({"server_load": sum(len(rank.jobs) for rank in self.ranks)})

    async def _reset(self, _request: web.Request) -> web.Response:
        for rank in self.ranks:
            rank.clear_cache()
        return web.Response()

    async def _sources(self, _request: web.Request) -> web.Response:
        host = self.options.host
        sources = []
        for number, rank in enumerate(self.ranks):
            publisher = rank.publisher
            if publisher is not None:
                replay = f"tcp://{host}:{publisher.replay_port}" if publisher.replay_port else None
                endpoint = f"tcp://{host}:{publisher.port}"
                topic = publisher.options.topic
                source = {"endpoint": endpoint, "replay_endpoint": replay, "topic": topic}
                sources.append({"data_parallel_rank": number, "publisher": "zmq", **source})
        return json_answer({"sources": sources})

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = [f"process_start_time_seconds {min(rank.started_at_s for rank in self.ranks)}"]
        for number, rank in enumerate(self.ranks):
            lines += self._rank_metrics(number, rank)
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    def _rank_metrics(self, number: int, rank: FakeRank) -> list[str]:
        labels = f'engine="{number}",model_name="{self.options.model}"'
        counters = rank.counters
        version = self.wire.version
        values: dict[str, float] = {
            "vllm:num_requests_running": rank.running,
            "vllm:num_requests_waiting": rank.waiting,
            "vllm:prompt_tokens_total": counters.prompt_tokens,
        }
        if version < (0, 12):
            values["vllm:gpu_cache_usage_perc"] = rank.engine.model.kv_use
        if version >= (0, 10):
            values["vllm:kv_cache_usage_perc"] = rank.engine.model.kv_use
        prefix = "vllm:prefix_cache" if version >= (0, 10) else "vllm:gpu_prefix_cache"
        values[f"{prefix}_queries_total"] = counters.prompt_tokens
        values[f"{prefix}_hits_total"] = counters.cached_tokens
        lines = [f"{name}{{{labels}}} {value}" for name, value in values.items()]
        blocks = self.kv_tokens // self.options.block_tokens
        config = f'block_size="{self.options.block_tokens}",engine="{number}",num_gpu_blocks="{blocks}"'
        return [*lines, f"vllm:cache_config_info{{{config}}} 1.0"]
