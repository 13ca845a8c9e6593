"""vLLM's ways: ranks by header, load and capacity from /metrics, event sources by configuration or by discovery."""

from __future__ import annotations

from services.instanceagent.engine_dialect import (
    LEAST_PAGE_TOKENS,
    EngineLoad,
    HttpEngineOptions,
    Learnt,
    configured_events,
    host_of,
    rank_endpoint,
)
from services.instanceagent.engine_http import EngineCallFailed, EngineHttp
from services.instanceagent.engine_request import EngineRequest
from services.instanceagent.http_engine import HttpEngine, HttpEngineParts
from services.instanceagent.kv_events import EventSource
from services.instanceagent.scrape import Sample, scrape, value_of

RANK_HEADER = "X-data-parallel-rank"

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CONFIG = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_SERIES = (_RUNNING, _WAITING, *_KV_USE, _CONFIG, _STARTED)
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")


class VllmDialect:
    """See `EngineDialect`."""

    name = "vllm"
    # Duplicates of a block and blocks of other tiers come and go by themselves.
    prefix_closed = False

    async def learn(self, http: EngineHttp, options: HttpEngineOptions) -> Learnt:
        """Version, capacity, event source. Raises EngineCallFailed."""
        version = (await http.get_json("/version")).get("version")
        samples = scrape(await http.get_text("/metrics"), (_CONFIG,))
        block_tokens, blocks = _capacity(samples, options.rank)
        events = configured_events(options, sglang=False) if options.events else None
        if events is None and options.events:
            events = await _discovered(http, options)
        if block_tokens is not None and block_tokens < LEAST_PAGE_TOKENS:
            events = None
        return Learnt(
            version=version if isinstance(version, str) else "",
            block_tokens=block_tokens,
            kv_tokens=block_tokens * blocks if block_tokens and blocks else None,
            events=events,
        )

    def place(self, request: EngineRequest, rank: int) -> None:
        """By header."""
        request.headers[RANK_HEADER] = str(rank)

    async def load(self, http: EngineHttp, options: HttpEngineOptions) -> EngineLoad:
        """From /metrics. vLLM tells no waiting tokens: the agent keeps its own ledger. Raises EngineCallFailed."""
        samples = scrape(await http.get_text("/metrics"), _SERIES)
        labels = {} if options.rank is None else {"engine": str(options.rank)}
        block_tokens, blocks = _capacity(samples, options.rank)
        return EngineLoad(
            running=int(value_of(samples, (_RUNNING,), labels) or 0),
            waiting=int(value_of(samples, (_WAITING,), labels) or 0),
            kv_use=value_of(samples, _KV_USE, labels) or 0.0,
            started_s=value_of(samples, (_STARTED,), {}),
            kv_tokens=block_tokens * blocks if block_tokens and blocks else None,
        )


def vllm_engine(options: HttpEngineOptions, parts: HttpEngineParts) -> HttpEngine:
    """One rank of a vLLM server."""
    return HttpEngine(VllmDialect(), options, parts)


def _capacity(samples: list[Sample], rank: int | None) -> tuple[int | None, int | None]:
    """Tokens of a block and number of blocks."""
    for sample in samples:
        if sample.name != _CONFIG or (rank is not None and sample.labels.get("engine", str(rank)) != str(rank)):
            continue
        size, blocks = sample.labels.get("block_size", ""), sample.labels.get("num_gpu_blocks", "")
        return (int(size) if size.isdigit() else None), (int(blocks) if blocks.isdigit() else None)
    return None, None


async def _discovered(http: EngineHttp, options: HttpEngineOptions) -> EventSource | None:
    """From /kv_event_sources, where there is one: newer versions only."""
    try:
        sources = (await http.get_json("/kv_event_sources")).get("sources")
    except EngineCallFailed as error:
        if error.status in (404, 405):
            return None
        raise
    wanted = options.rank or 0
    for number, source in enumerate(sources if isinstance(sources, list) else []):
        if not isinstance(source, dict) or source.get("data_parallel_rank", number) != wanted:
            continue
        endpoint, replay = source.get("endpoint"), source.get("replay_endpoint")
        if isinstance(endpoint, str) and endpoint:
            there = _reachable(replay, options.url) if isinstance(replay, str) and replay else None
            return EventSource(_reachable(endpoint, options.url), there, options.rank)
    return None


def _reachable(endpoint: str, url: str) -> str:
    """The endpoint with the engine's host where it names any."""
    scheme, mark, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    return rank_endpoint(f"{scheme}{mark}{host_of(url)}:{port}", 0) if host in _WILDCARDS else endpoint
