"""The client's side of Route and Submit: values into messages and back. Validates nothing: the server does."""

from __future__ import annotations

from dualmap.rpc.route_values import (
    Address,
    Done,
    Event,
    FirstToken,
    HttpChunk,
    Prompt,
    Pulse,
    Queued,
    Request,
    Route,
    Started,
    Tokens,
)
from dualmap.v1 import agent_pb2, router_pb2, types_pb2


def prompt_message(prompt: Prompt) -> types_pb2.Prompt:
    """The message of a prompt; a prompt without form gives an empty one, which the server refuses."""
    if prompt.hashes is not None:
        chain = types_pb2.CHAIN_KIND_CALLER if prompt.caller else types_pb2.CHAIN_KIND_TOKENS
        return types_pb2.Prompt(
            block_hashes=types_pb2.BlockHashes(
                hashes=prompt.hashes,
                chain=chain,
                prompt_tokens=prompt.prompt_tokens,
                block_tokens=prompt.block_tokens,
            )
        )
    if prompt.token_ids is not None:
        return types_pb2.Prompt(token_ids=prompt.token_ids)
    if prompt.text is not None:
        return types_pb2.Prompt(text=prompt.text)
    return types_pb2.Prompt()


def route_message(request: Request) -> router_pb2.RouteRequest:
    """The request as a router takes it."""
    return router_pb2.RouteRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        lora=request.lora,
        cache_salt=request.cache_salt,
        prompt=prompt_message(request.prompt),
        max_output_tokens=request.max_output_tokens,
        ttft_slo_ms=request.ttft_slo_ms,
        priority=request.priority,
        exclude_instance_ids=request.exclude,
    )


def route_value(message: router_pb2.RouteResponse) -> Route:
    """A router's answer as a value."""
    return Route(
        request_id=message.request_id,
        attempt=message.attempt,
        instance=_address(message.instance),
        backup=_address(message.backup) if message.HasField("backup") else None,
        ticket=message.ticket.SerializeToString(),
        reason=reason_name(message.reason),
        predicted_ttft_ms=message.predicted_ttft_ms,
        hit_tokens=message.hit_tokens,
        key_blocks=message.key_blocks,
        ring_epoch=message.ring_epoch,
        state_age_ms=message.state_age_ms,
        traceparent=message.ticket.traceparent,
    )


def submit_message(request: Request, ticket: bytes, instance_id: str) -> agent_pb2.SubmitRequest:
    """The request as an agent takes it, at the request's own attempt; an empty ticket is none."""
    message = agent_pb2.SubmitRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        prompt=prompt_message(request.prompt),
        model=request.model,
        lora=request.lora,
        cache_salt=request.cache_salt,
        max_output_tokens=request.max_output_tokens,
        ttft_slo_ms=request.ttft_slo_ms,
        priority=request.priority,
        instance_id=instance_id,
        age_ms=request.age_ms,
    )
    if ticket:
        message.ticket.ParseFromString(ticket)
    if request.openai is not None:
        message.openai.path = request.openai.path
        message.openai.body = request.openai.body
        message.openai.headers.update(request.openai.headers)
        message.openai.stream = request.openai.stream
    return message


def event_value(message: agent_pb2.RequestEvent) -> Event:
    """One event as a value; an event this version does not know is a sign of life."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        return Tokens(message.tokens.count, message.tokens.data)
    if kind == "http_chunk":
        chunk = message.http_chunk
        return HttpChunk(chunk.status, dict(chunk.headers), chunk.data)
    if kind == "first_token":
        first = message.first_token
        return FirstToken(
            first.instance_id, first.ttft_ms, first.hit_tokens, first.prompt_tokens, first.prefill_ms, first.data
        )
    if kind == "queued":
        return Queued(message.queued.instance_id, message.queued.position, message.queued.predicted_ttft_ms)
    if kind == "started":
        return Started(message.started.instance_id, message.started.waited_ms)
    if kind == "done":
        return _done(message.done)
    return Pulse()


def _done(done: agent_pb2.Done) -> Done:
    return Done(
        instance_id=done.instance_id,
        output_tokens=done.output_tokens,
        total_ms=done.total_ms,
        ttft_ms=done.ttft_ms,
        waited_ms=done.waited_ms,
        hit_tokens=done.hit_tokens,
        prompt_tokens=done.prompt_tokens,
        handovers=done.handovers,
        finish_reason=done.finish_reason,
    )


def _address(message: types_pb2.InstanceAddress) -> Address:
    return Address(message.instance_id, message.grpc_address, message.http_address)


def reason_name(number: int) -> str:
    """A reason's name without its prefix; the number itself where this version does not know it."""
    value = types_pb2.Reason.DESCRIPTOR.values_by_number.get(number)
    return value.name.removeprefix("REASON_") if value is not None else str(number)
