"""Heat reports to the ring managers, from a thread: the one that took the last report first, the next when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from dualmap.rpc.clients import sync_channel
from dualmap.rpc.convert_ring import HeatReport, heat_to_message
from dualmap.rpc.status import Problem, problem_of
from dualmap.v1 import ring_pb2_grpc


@dataclass(frozen=True, slots=True)
class HeatAnswer:
    """What the leader said. ``want_splits``: send the split table with the next report."""

    ring_epoch: int
    want_splits: bool


class HeatClient:
    """One thread's channels to the ring managers of a pool; each try has its own deadline."""

    def __init__(self, addresses: Sequence[str], pool: str, timeout_s: float = 0.5) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._channels = [sync_channel(address) for address in addresses]
        self._stubs = [ring_pb2_grpc.RingManagerStub(channel) for channel in self._channels]
        self._first = 0

    def report(self, report: HeatReport) -> HeatAnswer | Problem:
        """The leader's answer, or the last problem when no ring manager took the report."""
        message = heat_to_message(self._pool, report)
        problem = Problem(grpc.StatusCode.UNAVAILABLE, "no ring manager is configured")
        for step in range(len(self._stubs)):
            place = (self._first + step) % len(self._stubs)
            try:
                answer = self._stubs[place].ReportHeat(message, timeout=self._timeout_s)
            except grpc.RpcError as error:
                problem = problem_of(error)
                continue
            self._first = place
            return HeatAnswer(answer.ring_epoch, answer.want_splits)
        return problem

    def close(self) -> None:
        """Close the channels; a report under way fails."""
        for channel in self._channels:
            channel.close()
