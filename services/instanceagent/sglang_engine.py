"""SGLang's ways: ranks in the body, facts and event ports from /server_info, load from /v1/loads or /metrics."""

from __future__ import annotations

from services.instanceagent.engine_dialect import (
    LEAST_PAGE_TOKENS,
    EngineLoad,
    HttpEngineOptions,
    Learnt,
    configured_events,
    host_of,
)
from services.instanceagent.engine_http import EngineCallFailed, EngineHttp, number
from services.instanceagent.engine_request import EngineRequest
from services.instanceagent.http_engine import HttpEngine, HttpEngineParts
from services.instanceagent.kv_events import EventSource
from services.instanceagent.scrape import scrape, value_of

NEW_RANK_FIELD_SINCE = (0, 5, 23)
_INFO_PATHS = ("/server_info", "/get_server_info")
_SERIES = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "kv_use": "sglang:token_usage",
}
_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_MISSING = (404, 405)


class SglangDialect:
    """See `EngineDialect`. It remembers the version, which decides how a rank is named."""

    name = "sglang"
    prefix_closed = True

    def __init__(self) -> None:
        self._version: tuple[int, ...] = NEW_RANK_FIELD_SINCE
        self._has_loads = True

    async def learn(self, http: EngineHttp, options: HttpEngineOptions) -> Learnt:
        """From /server_info, or its older name. Raises EngineCallFailed."""
        info = await _server_info(http)
        version = info.get("version")
        self._version = _numbers(version) or NEW_RANK_FIELD_SINCE
        page, capacity, sequences = (
            number(info.get(name)) for name in ("page_size", "max_total_num_tokens", "max_running_requests")
        )
        described = info.get("kv_events")
        block = described if isinstance(described, dict) else {}
        events = configured_events(options, sglang=True) if options.events else None
        if events is None and options.events:
            events = _events(block, options)
        if page is not None and page < LEAST_PAGE_TOKENS:
            events = None
        return Learnt(
            version=version if isinstance(version, str) else "",
            block_tokens=int(page) if page else None,
            kv_tokens=int(capacity) if capacity else None,
            max_sequences=int(sequences) if sequences else None,
            events=events,
            load_endpoint=_endpoint(block, "load_endpoint_port_base", options),
        )

    def place(self, request: EngineRequest, rank: int) -> None:
        """By a field of the body."""
        name = "routed_dp_rank" if self._version >= NEW_RANK_FIELD_SINCE else "data_parallel_rank"
        request.body[name] = rank

    async def load(self, http: EngineHttp, options: HttpEngineOptions) -> EngineLoad:
        """From /v1/loads; of an older server from /metrics. Raises EngineCallFailed."""
        if self._has_loads:
            try:
                return _load_of(await http.get_json("/v1/loads?include=core"), options.rank or 0)
            except EngineCallFailed as error:
                if error.status not in _MISSING:
                    raise
                self._has_loads = False
        samples = scrape(await http.get_text("/metrics"), (*_SERIES.values(), "process_start_time_seconds"))
        labels = {} if options.rank is None else {"dp_rank": str(options.rank)}
        values = {name: value_of(samples, (series,), labels) or 0.0 for name, series in _SERIES.items()}
        started_s = value_of(samples, ("process_start_time_seconds",), {})
        return EngineLoad(int(values["running"]), int(values["waiting"]), values["kv_use"], started_s=started_s)


def sglang_engine(options: HttpEngineOptions, parts: HttpEngineParts) -> HttpEngine:
    """One rank of an SGLang server."""
    return HttpEngine(SglangDialect(), options, parts)


async def _server_info(http: EngineHttp) -> dict[str, object]:
    for path in _INFO_PATHS:
        try:
            return await http.get_json(path)
        except EngineCallFailed as error:
            if error.status not in _MISSING:
                raise
    raise EngineCallFailed("no_server_info")


def _events(block: dict[str, object], options: HttpEngineOptions) -> EventSource | None:
    if block.get("publisher") != "zmq":
        return None
    endpoint = _endpoint(block, "endpoint_port_base", options)
    if endpoint is None:
        return None
    return EventSource(endpoint, _endpoint(block, "replay_endpoint_port_base", options), options.rank, sglang=True)


def _endpoint(block: dict[str, object], port_field: str, options: HttpEngineOptions) -> str | None:
    """The rank's endpoint: base port plus rank, on the engine's host where it names a wildcard."""
    base, host = number(block.get(port_field)), block.get("endpoint_host")
    if not base:
        return None
    place = host_of(options.url) if not isinstance(host, str) or host in _WILDCARDS else host
    return f"tcp://{place}:{int(base) + (options.rank or 0)}"


def _load_of(answer: dict[str, object], rank: int) -> EngineLoad:
    listed = answer.get("loads")
    loads = [load for load in listed if isinstance(load, dict)] if isinstance(listed, list) else []
    for at, load in enumerate(loads):
        if load.get("dp_rank", at) == rank:
            break
    else:
        raise EngineCallFailed("no_load_of_rank")
    busy_us, uncached = number(load.get("total_prefill_busy_us")), number(load.get("num_waiting_uncached_tokens"))
    capacity = number(load.get("max_total_num_tokens"))
    return EngineLoad(
        running=int(number(load.get("num_running_reqs")) or 0),
        waiting=int(number(load.get("num_waiting_reqs")) or 0),
        kv_use=number(load.get("token_usage")) or 0.0,
        waiting_uncached_tokens=int(uncached) if uncached is not None else None,
        prefill_tokens=number(load.get("total_prefill_uncached_tokens")),
        prefill_busy_s=busy_us / 1e6 if busy_us is not None else None,
        kv_tokens=int(capacity) if capacity else None,
    )


def _numbers(version: object) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split(".") if isinstance(version, str) else ():
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)
