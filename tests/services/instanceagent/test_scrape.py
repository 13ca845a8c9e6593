"""Single values are found in a page of metrics, and what is no sample does no harm."""

from __future__ import annotations

from services.instanceagent.engine_dialect import host_of, rank_endpoint
from services.instanceagent.load_socket import load_of
from services.instanceagent.scrape import scrape, value_of

PAGE = """# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a \\"b\\" {c}"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} NaN
vllm:broken{engine="0"} many
up 1
"""


def test_a_series_is_found_by_its_exact_name_and_labels() -> None:
    """A longer name with the same beginning is another series."""
    samples = scrape(PAGE, ("vllm:num_requests_waiting", "up"))

    assert value_of(samples, ("vllm:num_requests_waiting",), {"engine": "1"}) == 4.0
    assert value_of(samples, ("vllm:num_requests_waiting",), {}) == 3.0
    assert value_of(samples, ("missing", "up"), {"engine": "1"}) == 1.0
    assert value_of(samples, ("vllm:num_requests_waiting",), {"engine": "2"}) is None


def test_what_is_no_number_is_passed_over() -> None:
    """NaN and words are no load."""
    assert scrape(PAGE, ("vllm:kv_cache_usage_perc", "vllm:broken")) == []


def test_a_rank_publishes_at_its_own_port() -> None:
    """Base port plus rank; a wildcard's host is the engine's."""
    assert rank_endpoint("tcp://10.0.0.1:5557", 3) == "tcp://10.0.0.1:5560"
    assert host_of("http://10.0.0.1:8000/base") == "10.0.0.1"
    assert host_of("http://[::1]:8000") == "[::1]"
    assert host_of("http://engine") == "engine"


def test_a_load_statistic_of_a_stranger_is_none() -> None:
    """Only what every version has is required; all else is passed over."""
    for payload in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 100_000):
        assert load_of(payload) is None
