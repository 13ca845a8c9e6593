"""A complete client in one file, with nothing but grpcio and the generated stubs: route, submit, retry on the backup.

    python docs/examples/client.py 127.0.0.1:7070[,127.0.0.1:7170] "a prompt"

The same steps in any other language: generate stubs from protos/, then do what `run` does.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator

import grpc

from dualmap.v1 import agent_pb2, agent_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

ROUTE_TIMEOUT_S = 0.5
REQUEST_TIMEOUT_S = 120.0
NEW_ROUTES = 3


class Failed(Exception):
    """The request was not served; ``begun``: it had given its first token, so it must not be run again."""

    def __init__(self, error: grpc.RpcError, begun: bool) -> None:
        super().__init__(f"{error.code().name}: {error.details()}")
        self.code = error.code()
        self.begun = begun


def route(routers: list[str], request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
    """Ask the routers in turn: they agree on the pair without talking to each other, so any will do."""
    last: grpc.RpcError | None = None
    for address in routers:
        with grpc.insecure_channel(address) as channel:
            try:
                return router_pb2_grpc.RouterStub(channel).Route(request, timeout=ROUTE_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                last = error
    if last is None:
        raise ValueError("no router was named")
    raise last


def submit(
    address: types_pb2.InstanceAddress, ticket: types_pb2.Ticket, request: router_pb2.RouteRequest, began_s: float
) -> Iterator[agent_pb2.RequestEvent]:
    """Run the request at one instance; its events until Done. Raises Failed."""
    message = agent_pb2.SubmitRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        # The deadline counts from when the caller first asked, at whichever attempt.
        age_ms=(time.monotonic() - began_s) * 1_000,
        ticket=ticket,
        prompt=request.prompt,
        max_output_tokens=request.max_output_tokens,
        instance_id=address.instance_id,
    )
    begun = False
    with grpc.insecure_channel(address.grpc_address) as channel:
        try:
            for answer in agent_pb2_grpc.InstanceAgentStub(channel).Submit(message, timeout=REQUEST_TIMEOUT_S):
                begun = begun or answer.event.WhichOneof("event") == "first_token"
                yield answer.event
        except grpc.RpcError as error:
            raise Failed(error, begun) from error


def run(routers: list[str], prompt: types_pb2.Prompt) -> Iterator[agent_pb2.RequestEvent]:
    """The instance first, then the backup with the same ticket and attempt + 1, then a new route."""
    request = router_pb2.RouteRequest(request_id=uuid.uuid4().hex, attempt=1, prompt=prompt, max_output_tokens=32)
    began_s = time.monotonic()
    failure: Failed | None = None
    for _ in range(NEW_ROUTES):
        answer = route(routers, request)
        places = [answer.instance, answer.backup] if answer.HasField("backup") else [answer.instance]
        for place in places:
            try:
                yield from submit(place, answer.ticket, request, began_s)
            except Failed as error:
                # Tokens were given, or the request itself is wrong: another instance would not help.
                if error.begun or error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    raise
                failure = error
                request.attempt += 1
            else:
                return
    if failure is not None:
        raise failure


def main() -> None:
    """Run one prompt and print its events."""
    for event in run(sys.argv[1].split(","), types_pb2.Prompt(text=sys.argv[2])):
        kind = event.WhichOneof("event") or "unknown"
        sys.stdout.write(f"{kind} " + str(getattr(event, kind)).replace("\n", " ") + "\n")


if __name__ == "__main__":
    main()
