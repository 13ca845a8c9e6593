"""Traces: what is read, what is refused, and that a refusal names file, line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dualmap.core.state import PrefillCost
from dualmap.simulator.arrivals import capacity_bound, ceiling_hit_rate, own_arrivals, poisson_arrivals
from dualmap.simulator.synthetic import synthetic_trace
from dualmap.simulator.trace import TraceError, read_trace


def row(**changes: object) -> str:
    fields: dict[str, object] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
    fields.update(changes)
    return json.dumps(fields)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_plain_and_gzip_read_the_same(tmp_path: Path) -> None:
    """A gzip'ed trace is the trace."""
    lines = row(), row(timestamp=3000, hash_ids=[0, 2])
    plain = write(tmp_path / "a.jsonl", *lines)
    zipped = tmp_path / "a.bin"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_trace(plain) == read_trace(zipped)
    assert [request.timestamp_s for request in read_trace(plain)] == [0.0, 3.0]
    assert read_trace(plain)[0].full_blocks == (0,)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (row(timestamp=-1), "timestamp"),
        (row(input_length=0), "input_length"),
        (row(input_length=10**12), "input_length"),
        (row(input_length="12"), "input_length"),
        (row(hash_ids=[]), "hash_ids"),
        (row(hash_ids=[3, 3]), "hash_ids"),
        (row(hash_ids=["3", 4]), "hash_ids"),
        (row(output_length=-1), "output_length"),
        (row(output_length=10**12), "output_length"),
        (row(timestamp=float("nan")), "timestamp"),
        (row(timestamp="0"), "timestamp"),
        (row(hash_ids=[-3, 3]), "hash_ids"),
        (row(hash_ids=[1, 2, 3, 4]), "hash_ids"),
        ('{"timestamp": 0}', "input_length"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
    ],
)
def test_a_wrong_line_is_named_with_file_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    """Whoever made the file learns where to look."""
    path = write(tmp_path / "bad.jsonl", row(), line)

    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: .*{field}"):
        read_trace(path)


def test_skip_bad_leaves_the_line_out_and_tells(tmp_path: Path) -> None:
    """Skipping is a choice, and counted."""
    path = write(tmp_path / "bad.jsonl", row(), "{", row())
    told: list[TraceError] = []

    assert len(read_trace(path, skip_bad=True, on_skip=told.append)) == 2
    assert [error.line for error in told] == [2]


def test_a_truncated_gzip_is_an_error_even_when_bad_lines_are_skipped(tmp_path: Path) -> None:
    """A cut file is not a short trace."""
    path = tmp_path / "cut.gz"
    whole = gzip.compress("\n".join(row(hash_ids=[0, n + 1]) for n in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(TraceError, match="truncated"):
        read_trace(path, skip_bad=True)


def test_mixed_encodings_are_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are named by line; a byte-order mark is accepted."""
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + row().encode() + b"\n" + row().encode("utf-16") + b"\n")

    with pytest.raises(TraceError, match=r"mixed\.jsonl:2: encoding"):
        read_trace(path)


def test_missing_empty_and_foreign_files_are_errors(tmp_path: Path) -> None:
    """Nothing to read is said."""
    for path in (tmp_path / "none", write(tmp_path / "empty", ""), write(tmp_path / "foreign", "hello")):
        with pytest.raises(TraceError):
            read_trace(path)


def test_times_that_go_back_are_put_in_order(tmp_path: Path) -> None:
    """The stated rule: a stable sort by time, from zero."""
    path = write(tmp_path / "a", row(timestamp=5000, hash_ids=[0, 9]), row(timestamp=2000), row(timestamp=2000))

    assert [request.timestamp_s for request in read_trace(path)] == [0.0, 0.0, 3.0]


def test_ids_need_not_be_in_order_and_a_prompt_shorter_than_a_block_needs_none(tmp_path: Path) -> None:
    """The stated rules: an id names a prefix and no number is told by its size; only whole blocks must have one."""
    path = write(
        tmp_path / "a", row(hash_ids=[7, 2]), row(input_length=300, hash_ids=[]), row(input_length=300, hash_ids=[9])
    )
    first, without, with_one = read_trace(path)

    assert first.hash_ids == (7, 2)
    assert without.full_blocks == with_one.full_blocks == ()
    assert without.hash_ids == ()


def test_a_damaged_azure_line_is_named(tmp_path: Path) -> None:
    """Whatever the format: file, line and field."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    for line, field in (
        ("2023-11-16 18:15:46,-4,1", "ContextTokens"),
        ("yesterday,4,1", "TIMESTAMP"),
        ("1,2", "columns"),
    ):
        with pytest.raises(TraceError, match=rf"a\.csv:2: .*{field}"):
            read_trace(write(tmp_path / "a.csv", head, line))


def test_over_long_prompts_are_cut_or_skipped(tmp_path: Path) -> None:
    """Both readings of truncation, by name."""
    path = write(tmp_path / "a", row(), row(input_length=5000, hash_ids=list(range(10))))

    assert [r.input_tokens for r in read_trace(path, max_input=2048, over_long="cut")] == [1000, 2048]
    assert [len(r.hash_ids) for r in read_trace(path, max_input=2048, over_long="cut")] == [2, 4]
    assert len(read_trace(path, max_input=2048, over_long="skip")) == 1


def test_azure_rows_and_agentic_sessions_are_read(tmp_path: Path) -> None:
    """The other two formats are told by their first line; ids of one session never meet another's."""
    azure = write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44")
    session = {
        "id": "s",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]},
            {"t": 5.0, "type": "subagent", "requests": [{"t": 1.0, "type": "n", "in": 65, "out": 1, "hash_ids": [1]}]},
        ],
    }
    agentic = write(tmp_path / "s.jsonl", json.dumps(session), json.dumps(session))

    assert read_trace(azure)[0].input_tokens == 374
    read = read_trace(agentic)
    assert [request.timestamp_s for request in read] == [0.0, 6.0, 30.0, 36.0]
    assert read[0].hash_ids == read[1].hash_ids != read[2].hash_ids


def test_arrivals_repeat_with_their_seed() -> None:
    """Poisson arrivals have the asked rate and the same seed gives the same times."""
    made = synthetic_trace("skew", 2000, 1)
    once = poisson_arrivals(made, 4.0, 7)

    assert once == poisson_arrivals(made, 4.0, 7)
    assert once != poisson_arrivals(made, 4.0, 8)
    assert 450 < once[-1].timestamp_s < 550


def test_ticks_are_spread_or_kept(tmp_path: Path) -> None:
    """Own timing scales to the rate; a tick's burst stays only when it is wanted."""
    path = write(tmp_path / "a", *(row(timestamp=3000 * (n // 10), hash_ids=[0, n + 1]) for n in range(40)))
    read = read_trace(path)

    kept = own_arrivals(read, spread=False)
    spread = own_arrivals(read, 10.0, spread=True, seed=3)
    assert len({request.timestamp_s for request in kept}) == 4
    assert len({request.timestamp_s for request in spread}) == 40
    assert [request.timestamp_s for request in spread] == sorted(request.timestamp_s for request in spread)


@pytest.mark.parametrize("kind", ["skew", "bursts", "chat"])
def test_synthetic_workloads_repeat_and_keep_cumulative_ids(kind: str) -> None:
    """The shipped generator is a function of its seed, and blocks fit the lengths."""
    made = synthetic_trace(kind, 500, 3)

    assert made == synthetic_trace(kind, 500, 3)
    assert len(made) == 500
    assert all(len(request.hash_ids) == request.input_tokens // request.block_tokens for request in made)
    assert ceiling_hit_rate(made) > 0.2


def test_the_bound_counts_every_block_once(tmp_path: Path) -> None:
    """Two equal prompts cost one and their tails."""
    path = write(tmp_path / "a", row(), row())
    cost = PrefillCost(a_s=1.0, b_s_per_token=0.001)

    assert capacity_bound(read_trace(path), 1, cost) == pytest.approx(2 / (1.0 + 0.488))
    assert ceiling_hit_rate(read_trace(path)) == pytest.approx(512 / 2000)
