"""RouteStream: each answer names its request, a bad message never ends the stream, and streams are few."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import grpc
import pytest

from dualmap.rpc.status import problem_of
from dualmap.v1 import router_pb2
from tests.services.router.harness import Limits, Router, chain_of_blocks, pool_of, request, running_router


class Talk:
    """One open stream, fed message by message."""

    def __init__(self, router: Router) -> None:
        self._asked: queue.SimpleQueue[router_pb2.RouteStreamRequest | None] = queue.SimpleQueue()
        self.answers = router.stub.RouteStream(self._feed(), timeout=20)

    def _feed(self) -> Iterator[router_pb2.RouteStreamRequest]:
        while (message := self._asked.get()) is not None:
            yield message

    def ask(self, message: router_pb2.RouteRequest) -> router_pb2.RouteStreamResponse:
        self._asked.put(router_pb2.RouteStreamRequest(request=message))
        answer: router_pb2.RouteStreamResponse = next(self.answers)
        return answer

    def close(self) -> None:
        self._asked.put(None)


def test_each_answer_names_its_request_and_is_what_route_says(router: Router) -> None:
    """The same identity over the stream and by a call has the same answer."""
    talk = Talk(router)
    messages = [request(f"r{number}", chain_of_blocks(number, 4)) for number in range(20)]

    answers = [talk.ask(message) for message in messages]
    talk.close()

    assert [answer.request_id for answer in answers] == [f"r{number}" for number in range(20)]
    assert answers[3].response == router.route(messages[3])
    assert list(talk.answers) == []


def test_a_bad_message_is_answered_and_the_stream_goes_on(router: Router) -> None:
    """Each failure is an answer with the status that Route would have had."""
    talk = Talk(router)

    bad = talk.ask(request("bad", priority=9))
    empty = talk.ask(router_pb2.RouteRequest())
    unknown = talk.ask(request("who", (1,), model="gpt"))
    good = talk.ask(request("good", chain_of_blocks(1, 4)))
    talk.close()

    assert (bad.request_id, bad.error.code) == ("bad", grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert "priority" in bad.error.message
    assert empty.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert unknown.error.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert good.response.instance.instance_id
    assert router.metrics.counts["stream_errors"] == 3


def test_a_refusal_in_a_stream_carries_its_delay() -> None:
    """Retry advice travels inside the stream too."""
    with running_router(pool_of(0)) as router:
        talk = Talk(router)
        answer = talk.ask(request("r", (1,)))
        talk.close()

    assert answer.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert answer.error.retry_after_ms == 500


def test_one_stream_too_many_is_refused_while_calls_go_on() -> None:
    """Open streams hold up no call, and the next stream is RESOURCE_EXHAUSTED."""
    with running_router(pool_of(2), Limits(streams=3)) as router:
        talks = [Talk(router) for _ in range(3)]
        for number, talk in enumerate(talks):
            talk.ask(request(f"r{number}", (1,)))

        refused = Talk(router)
        with pytest.raises(grpc.RpcError) as failed:
            refused.ask(request("x", (1,)))
        refused.close()
        called = router.route(request("call", (1,)))
        talks[0].close()
        assert list(talks[0].answers) == []
        assert wait_for_room(router)
        for talk in talks:
            talk.close()

    assert problem_of(failed.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert problem_of(failed.value).retry_after_ms
    assert called.instance.instance_id


def wait_for_room(router: Router) -> bool:
    """The place of a closed stream is free as soon as its end was written."""
    pause = threading.Event()
    for _ in range(200):
        talk = Talk(router)
        try:
            talk.ask(request("again", (1,)))
        except grpc.RpcError:
            pause.wait(0.01)
            continue
        finally:
            talk.close()
        return True
    return False


def test_a_stopping_router_ends_its_streams_at_once() -> None:
    """An idle stream does not use up the grace, and a new one is refused."""
    with running_router(pool_of(2)) as router:
        talk = Talk(router)
        talk.ask(request("r", (1,)))

        router.streams.end()

        with pytest.raises(grpc.RpcError) as failed:
            next(talk.answers)
        talk.close()
        late = Talk(router)
        with pytest.raises(grpc.RpcError) as refused:
            late.ask(request("late", (1,)))
        late.close()

    assert problem_of(failed.value).code is grpc.StatusCode.CANCELLED
    assert problem_of(refused.value).code is grpc.StatusCode.UNAVAILABLE
