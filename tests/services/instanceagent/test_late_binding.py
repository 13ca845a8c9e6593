"""Late binding: offers are bounded and expire, a freed instance pulls what it can serve, early binding says no."""

from __future__ import annotations

import grpc
import pytest

from dualmap.core.binding import BindingOptions
from dualmap.core.blocks import Chain
from dualmap.rpc.convert_offer import OfferBatch, OfferItem, PullOrder
from dualmap.v1 import agent_pb2, types_pb2
from services.instanceagent.late_binding import MAX_OFFERS_HELD, OFFER_TTL_MS, OfferBook, Valuation
from tests.services.instanceagent.cluster import cluster, submission, submit, until


def _miss_of(chain: Chain) -> tuple[int, int]:
    return chain.prompt_tokens, 0


VALUATION = Valuation(_miss_of, lambda miss, _context: miss / 1_000, lambda miss: max(128, miss))


def _item(request_id: str, deadline_ms: float = 5_000, miss_tokens: int = 100) -> OfferItem:
    return OfferItem(request_id, 1, deadline_ms, 0.0, 0, 1_000, miss_tokens, 1_000, 0, None)


def _batch(*items: OfferItem, withdrawn: tuple[str, ...] = ()) -> OfferBatch:
    return OfferBatch("holder/0", "here/0", items, withdrawn)


def test_offers_are_bounded_expire_and_are_withdrawn() -> None:
    """Never more than the bound; forgotten when not repeated; gone when withdrawn."""
    pulled: list[PullOrder] = []
    book = OfferBook(VALUATION, pulled.append, BindingOptions())
    book.take(_batch(*(_item(f"r{i}") for i in range(MAX_OFFERS_HELD + 10))), 0.0)
    assert len(book) == MAX_OFFERS_HELD
    book.take(_batch(withdrawn=("r20",)), 0.0)
    assert len(book) == MAX_OFFERS_HELD - 1
    assert book.choose([], OFFER_TTL_MS + 1, 1 << 30, 0.0) is None
    assert len(book) == 0
    assert pulled == []


def test_a_chosen_offer_is_pulled_once_and_its_room_kept_until_it_comes_or_is_refused() -> None:
    """The wish names holder and request; its charge is reserved meanwhile."""
    pulled: list[PullOrder] = []
    book = OfferBook(VALUATION, pulled.append, BindingOptions())
    book.take(_batch(_item("late", deadline_ms=10), _item("good", miss_tokens=300)), 0.0)
    order = book.choose([], 0.0, 8_192, 0.0)
    assert isinstance(order, PullOrder)
    assert (order.holder_instance_id, order.request_id) == ("holder/0", "good")
    assert pulled == [order]
    assert book.pulling_tokens(0.0) == 300
    assert book.choose([], 0.0, 8_192, 0.0) is None, "one beyond saving stays with its holder"
    assert book.arrived("good", 1)
    assert not book.arrived("good", 1)
    assert book.pulling_tokens(0.0) == 0
    book.take(_batch(_item("again")), 0.0)
    second = book.choose([], 0.0, 8_192, 0.0)
    assert isinstance(second, PullOrder)
    book.refused(second)
    assert book.pulls == 0


async def test_a_free_instance_pulls_what_waits_at_the_other_candidate() -> None:
    """The holder is stuck: everything with a backup is served there, once, on the first stream."""
    async with cluster("a", "b", agent={"binding": "late", "max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        built.pause("a")
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9))
        await until(lambda: "started" in running.kinds, "full")
        ticket = types_pb2.Ticket(
            router_id=1,
            instance_id="a/0",
            agent_epoch=built.agents["a"].agent.facts.agent_epoch,
            sequence=1,
            chosen=types_pb2.Promise(instance_id="a/0"),
            backup=types_pb2.Promise(instance_id="b/0"),
        )
        waiting = [submit(stub, submission(f"r{i}", seed=i, ticket=ticket)) for i in range(4)]
        waiting.append(submit(stub, submission("no-ticket", seed=7)))
        for following in waiting:
            assert await following.end() is grpc.StatusCode.OK
            assert following.first("done").instance_id == "b/0"
            assert following.kinds.count("first_token") == 1
        assert built.instance("a").load().offered_s == 0
        built.resume("a")
        assert await running.end() is grpc.StatusCode.OK
        assert built.instance("b").counters.moved_in == 5


async def test_a_holder_that_works_keeps_what_it_can_serve_in_time() -> None:
    """An idle other candidate is offered nothing while the holder can still meet what waits."""
    async with cluster("a", "b", agent={"binding": "late", "max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9, max_output_tokens=20))
        await until(lambda: "started" in running.kinds, "full")
        waiting = submit(stub, submission("roomy", seed=1, ttft_slo_ms=60_000))
        assert await waiting.end() is grpc.StatusCode.OK
        assert await running.end() is grpc.StatusCode.OK
        assert waiting.first("done").instance_id == "a/0"
        assert built.instance("b").counters.moved_in == 0


async def test_early_binding_neither_takes_offers_nor_is_pulled_from() -> None:
    """FAILED_PRECONDITION with the reason."""
    async with cluster("a") as built:
        stub = built.stub("a")
        offer = agent_pb2.OfferRequest(holder_instance_id="x/0", target_instance_id="a/0")
        pull = agent_pb2.PullRequest(holder_instance_id="a/0", target_instance_id="x/0", request_id="r")
        for call, message in ((stub.Offer, offer), (stub.Pull, pull)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(message, timeout=5)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "binding is early" in (refused.value.details() or "")
