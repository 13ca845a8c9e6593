"""Streams are cut where events end, first tokens found, last events read, whatever the engine's spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.instanceagent import answer_stream as stream
from services.instanceagent.answer_stream import BadStream, EventSplitter, Usage
from services.instanceagent.whole_answer import WholeAnswer


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_events_come_out_whole_however_the_bytes_arrive() -> None:
    """Byte by byte or all at once, the same events."""
    data = event({"a": 1}) + event({"b": 2}) + b"data: [DONE]\n\n"
    splitter = EventSplitter()

    out = b"".join(splitter.feed(data[at : at + 1]) for at in range(len(data)))

    assert out == data
    assert EventSplitter().feed(data + b"data: {") == data
    assert stream.ends(out)


def test_an_event_without_end_is_refused() -> None:
    """Memory is bounded whatever the engine sends."""
    splitter = EventSplitter()
    for _ in range(16):
        assert splitter.feed(bytes(1 << 20)) == b""

    with pytest.raises(BadStream):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("choice", "first"),
    [
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": None}}, False),
        ({"delta": {"role": "assistant", "content": "hi"}}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {"reasoning_content": "hm"}}, True),
        ({"delta": {"role": "assistant", "tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, True),
        ({"text": ""}, True),
        ({"text": "hi"}, True),
    ],
)
def test_a_role_alone_is_no_first_token(choice: dict[str, Any], first: bool) -> None:
    """All else that a choice may carry is."""
    assert stream.has_token({"choices": [choice]}) is first


def test_a_chunk_without_choices_is_no_token() -> None:
    """The usage at the end."""
    assert not stream.has_token({"choices": []})
    assert not stream.has_token({})


def test_what_a_user_writes_is_never_taken_for_what_the_engine_says() -> None:
    """Quotes inside a content are escaped."""
    text = '"finish_reason": "stop" "choices": [] data: {"error"'
    chunk = event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})

    assert stream.finish_reason_in(chunk) is None
    assert not stream.may_have_usage(chunk)
    assert not stream.names_error(chunk)


@pytest.mark.parametrize("text", [b'data: {"choices":[],"usage":{}}\n\n', b'data: {"choices": [ ], "usage": {}}\n\n'])
def test_usage_is_found_in_any_spacing(text: bytes) -> None:
    """Engines encode JSON in their own ways."""
    assert stream.may_have_usage(text)


def test_usage_tells_cached_tokens_only_where_the_engine_does() -> None:
    """Absent is unknown, not zero."""
    usage = {"prompt_tokens": 7, "completion_tokens": 2}

    assert stream.usage_of({"usage": usage}) == Usage(7, 2, None)
    assert stream.usage_of({"usage": usage | {"prompt_tokens_details": None}}) == Usage(7, 2, None)
    assert stream.usage_of({"usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}}) == Usage(7, 2, 3)
    assert stream.usage_of({"usage": None}) is None


@pytest.mark.parametrize("bad", [b"data: {\n\n", b"data: []\n\n", event({"error": {"message": "no"}})])
def test_a_broken_event_and_an_error_are_refused(bad: bytes) -> None:
    """With a problem fit for a log: nothing of the event itself."""
    with pytest.raises(BadStream):
        stream.parse(bad)


def test_comments_are_passed_over() -> None:
    """Some servers send them to keep a connection alive."""
    assert stream.parse(b": ping\n\n") is None


def test_a_whole_answer_has_all_that_its_chunks_had() -> None:
    """Several choices, tool calls in pieces, reasoning, log probabilities, usage."""
    chunks: list[dict[str, Any]] = [
        {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"id": "x", "choices": [{"index": 0, "delta": {"reasoning_content": "so"}, "logprobs": {"content": [1]}}]},
        {"id": "x", "choices": [{"index": 1, "delta": {"content": "b"}}]},
        {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [2]}}]},
        {
            "id": "x",
            "choices": [
                {
                    "index": 1,
                    "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]},
                }
            ],
        },
        {"choices": [{"index": 1, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"completion_tokens": 9}},
    ]
    answer = WholeAnswer(chat=True)
    for chunk in chunks:
        answer.add(chunk)

    body = json.loads(answer.body)

    first, second = body["choices"]
    assert (body["id"], body["object"], body["usage"]) == ("x", "chat.completion", {"completion_tokens": 9})
    assert first["message"] == {"role": "assistant", "content": "a", "reasoning_content": "so"}
    assert (first["logprobs"], first["finish_reason"]) == ({"content": [1, 2]}, "stop")
    assert second["message"]["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    assert second["finish_reason"] == "tool_calls"
