"""NVIDIA Dynamo's selection service (`ai-dynamo-runtime`, extra `peers`), in process, at its defaults.

Rule: its own; it is asked with `select_and_reserve` and told of first tokens and ends. It hears of every block stored
and dropped by KV events over loopback, as engines send them, and a decision waits until it has taken them in, so its
state is exact whatever the poll period. A block stands for one of 16 tokens made from our chained hash; lengths are
scaled alike. One service, however many routers. It breaks ties at random: runs need not repeat bit for bit. It is not
told of joins, drains and failures.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, ClassVar

import msgspec
import zmq

from dualmap.core.blocks import Chain
from dualmap.core.choose import RouteQuery
from dualmap.core.engine_model import BlocksRemoved, BlocksStored, Done, EngineEvent, FirstToken
from dualmap.core.errors import DualMapError, NoInstance
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Placement, Sight, eligible, look

BLOCK = 16
"""Tokens of a block as the service is told; its own customary size."""

_LONGEST_WAIT_S = 30.0
_MODEL = "simulated"
_TOKEN_BITS = 0xFFFF_FFFF


class PeerMissingError(DualMapError):
    """The package of a peer is not installed, or does not do what it is known to do."""

    reason = "PEER_MISSING"


def load_service() -> Callable[..., Any]:
    """The class of the service.

    Raises:
        PeerMissingError: the wheel cannot be imported.
    """
    # Its log tells of every selection; only what the environment does not say is set.
    os.environ.setdefault("DYN_LOG", "error")
    try:
        from dynamo.llm import SelectionService  # noqa: PLC0415 - optional
    except ImportError as error:
        problem = str(error).splitlines()[0]
        raise PeerMissingError(f"dynamo: needs ai-dynamo-runtime: pip install 'dualmap[peers]' ({problem})") from None
    return SelectionService  # type: ignore[no-any-return]


class _Worker:
    """One instance as the service knows it: a publisher of KV events."""

    def __init__(self, number: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.number = number
        self.socket = context.socket(zmq.PUB)
        self.socket.set_hwm(0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.dirty = False
        self.marks = 0
        self._sent = 0

    @property
    def mark(self) -> int:
        """Token of the newest mark: a block of no prompt that shows how far the service has read."""
        return (self.number << 20 | self.marks) & _TOKEN_BITS

    def send(self, *events: list[object]) -> None:
        """Publish a batch."""
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self.socket.send_multipart([b"kv-events", struct.pack(">Q", self._sent), payload])
        self._sent += 1


class Dynamo:
    """Asks the service; one run each."""

    name: ClassVar[str] = "dynamo"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def __init__(self) -> None:
        service = load_service()
        self._loop = asyncio.new_event_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._service = self._wait(lambda: _made(service))
        self._workers: dict[str, _Worker] = {}
        self._chains: dict[str, Chain] = {}

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """The service's selection, booked with it."""
        del output_tokens
        views = {view.instance_id: view for view in eligible(sight, query)}
        if not views:
            raise NoInstance(1_000)
        for instance_id in sight.picture.ring.instance_ids:
            if instance_id not in self._workers:
                self._join(instance_id)
        for worker in self._workers.values():
            if worker.dirty:
                self._catch_up(worker)
        chain = query.chain
        self._chains[query.request_id] = chain
        asked = {"model_name": _MODEL, "token_ids": _tokens(chain), "selection_id": query.request_id}
        number = self._wait(lambda: self._service.select_and_reserve(asked))["worker_id"]
        chosen = next(instance_id for instance_id, one in self._workers.items() if one.number == number)
        return Placement(look(chain, views[chosen], sight.picture.default_slo_s))

    def observe(self, instance_id: str, events: Iterable[EngineEvent]) -> None:
        """Pass on what an engine did."""
        worker = self._workers[instance_id]
        for event in events:
            if isinstance(event, FirstToken):
                identity = event.request_id
                self._wait(lambda: self._service.prefill_complete(identity))  # noqa: B023 - awaited at once
            elif isinstance(event, Done):
                identity = event.request_id
                self._wait(lambda: self._service.free_reservation(identity))  # noqa: B023 - awaited at once
                del self._chains[event.request_id]
            elif isinstance(event, BlocksStored) and event.request_id:
                hashes = self._chains[event.request_id].hashes
                first = hashes.index(event.hashes[0])
                parent = hashes[first - 1] if first else None
                worker.send(_stored(event.hashes, parent))
                worker.dirty = True
            elif isinstance(event, BlocksRemoved):
                worker.send(["BlockRemoved", list(event.hashes)])
                worker.dirty = True

    def close(self) -> None:
        """Stop the service and its sockets."""
        self._service.shutdown()
        for worker in self._workers.values():
            worker.socket.close(linger=0)
        self._context.term()
        self._loop.close()

    def _join(self, instance_id: str) -> None:
        worker = _Worker(len(self._workers) + 1, self._context)
        self._workers[instance_id] = worker
        record = {
            "worker_id": worker.number,
            "model_name": _MODEL,
            "block_size": BLOCK,
            "endpoint": f"http://127.0.0.1:{worker.port}",
            "kv_events_endpoints": {0: f"tcp://127.0.0.1:{worker.port}"},
        }
        self._wait(lambda: self._service.upsert_worker(record))
        self._catch_up(worker)

    def _catch_up(self, worker: _Worker) -> None:
        """Wait until the service has read all that was sent: it then knows a mark sent last."""
        give_up_s = time.monotonic() + _LONGEST_WAIT_S
        old = worker.mark
        worker.marks += 1
        mark = worker.mark
        asked = {"model_name": _MODEL, "token_ids": [mark] * BLOCK}
        worker.send(["BlockRemoved", [old]], _stored((mark,), None))
        again_s = time.monotonic() + 0.1
        while not self._knows(worker, asked):
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise PeerMissingError(f"dynamo: the service took in no KV event within {_LONGEST_WAIT_S:.0f} s")
            if now_s > again_s:
                # It had not subscribed yet; all that is lost is a mark.
                worker.send(_stored((mark,), None))
                again_s = now_s + 0.1
        worker.dirty = False

    def _knows(self, worker: _Worker, asked: Mapping[str, object]) -> bool:
        scores = self._wait(lambda: self._service.overlap_scores(asked))
        return any(one["worker_id"] == worker.number and one["device_blocks"] for one in scores["workers"])

    def _wait(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async def called() -> Any:
            return await call()

        return self._loop.run_until_complete(called())


async def _made(service: Callable[..., Any]) -> Any:
    """Made inside a loop: it needs a running one."""
    return service(indexer_threads=1)


def _tokens(chain: Chain) -> list[int]:
    tokens = [block & _TOKEN_BITS for block in chain.hashes for _ in range(BLOCK)]
    tail = chain.prompt_tokens - len(chain.hashes) * chain.block_tokens
    # Ends in a part of a block that is never cached.
    return tokens + [0] * max(0 if tokens else 1, tail * BLOCK // chain.block_tokens)


def _stored(hashes: tuple[int, ...], parent: int | None) -> list[object]:
    tokens = [block & _TOKEN_BITS for block in hashes for _ in range(BLOCK)]
    return ["BlockStored", list(hashes), parent, tokens, BLOCK, None]
