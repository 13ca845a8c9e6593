"""Calls to an engine's HTTP port: each with a deadline, failures as values that a counter can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

MAX_ANSWER_BYTES = 16 * 1024 * 1024


class EngineCallFailed(Exception):
    """A call brought no usable answer. ``reason`` is fit for a metric; ``status`` is 0 where HTTP brought none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Seconds: to connect, for a short call in all, of silence on a stream, for a stream in all."""

    connect_s: float = 2.0
    call_s: float = 5.0
    silence_s: float = 300.0
    stream_s: float = 3_600.0


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where an engine serves. ``api_key`` goes into the Authorization header and nowhere else."""

    url: str
    api_key: str = field(default="", repr=False)
    times: HttpTimes = field(default_factory=HttpTimes)


class EngineHttp:
    """One engine's HTTP port. Open before use, close after."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return self._target.url.rstrip("/")

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            raise RuntimeError("open the port first")
        return self._session

    async def open(self) -> None:
        """Make the session; connects to nothing yet."""
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        times = self._target.times
        timeout = aiohttp.ClientTimeout(total=times.stream_s, sock_connect=times.connect_s, sock_read=times.silence_s)
        # The feed rule bounds how many requests run at once, not the connector.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get_text(self, path: str) -> str:
        """Body of a GET. Raises EngineCallFailed."""
        return (await self._call("GET", path, None, {})).decode(errors="replace")

    async def get_json(self, path: str) -> dict[str, object]:
        """Body of a GET that answers an object. Raises EngineCallFailed."""
        return _object(await self._call("GET", path, None, {}))

    async def post_json(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None, total_s: float = 0.0
    ) -> dict[str, object]:
        """Answer of a POST. ``total_s`` 0: the short calls' deadline. Raises EngineCallFailed."""
        return _object(await self._call("POST", path, msgspec.json.encode(body), headers or {}, total_s))

    async def _call(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], total_s: float = 0.0
    ) -> bytes:
        times = self._target.times
        timeout = aiohttp.ClientTimeout(total=total_s or times.call_s, sock_connect=times.connect_s)
        sent = {**headers, "Content-Type": "application/json"} if body is not None else dict(headers)
        try:
            async with self.session.request(
                method, self.url + path, data=body, headers=sent, timeout=timeout
            ) as response:
                answer = await response.content.read(MAX_ANSWER_BYTES)
                while not response.content.at_eof() and len(answer) < MAX_ANSWER_BYTES:
                    answer += await response.content.read(MAX_ANSWER_BYTES - len(answer))
                if response.status != 200:
                    raise EngineCallFailed(f"http_{response.status}", response.status)
                return answer
        except aiohttp.ClientConnectorError as error:
            raise EngineCallFailed("not_connected") from error
        except TimeoutError as error:
            raise EngineCallFailed("timeout") from error
        except aiohttp.ClientError as error:
            raise EngineCallFailed("broken_connection") from error


def _object(answer: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EngineCallFailed("not_json") from error
    if not isinstance(value, dict):
        raise EngineCallFailed("not_an_object")
    return value


def number(value: object) -> float | None:
    """A number out of JSON; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
