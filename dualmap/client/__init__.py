"""The Python client: routers in turn, a retry on the backup, values in and values out.

async with DualMapClient(["127.0.0.1:7070"]) as client:
    async for event in client.run(Request("r-1", Prompt.of_tokens(ids))):
        ...
"""

from __future__ import annotations

from dualmap.client.client import ClientOptions, Completion, DualMapClient, OnRoute
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.route_values import (
    Address,
    Done,
    Event,
    FirstToken,
    HttpChunk,
    OpenAiBody,
    Prompt,
    Pulse,
    Queued,
    Request,
    Route,
    Started,
    Tokens,
)

__all__ = [
    "Address",
    "CallFailed",
    "ClientOptions",
    "Completion",
    "Done",
    "DualMapClient",
    "Event",
    "FirstToken",
    "HttpChunk",
    "OnRoute",
    "OpenAiBody",
    "Prompt",
    "Pulse",
    "Queued",
    "Request",
    "Route",
    "Started",
    "Tokens",
]
