"""`dualmap explain` before real routers: every router asked, both candidates and the rule shown."""

from __future__ import annotations

import json

from tests.cli.conftest import Run
from tests.cli.services import nobody
from tests.cli.test_route import address_of, bookings
from tests.services.router.harness import pool_of, running_router


def test_a_routed_request_is_explained_by_the_router_that_placed_it(run: Run, ids: str) -> None:
    """Asked of both, answered by one: rule, key and candidates."""
    with running_router(pool_of(3)) as first, running_router(pool_of(3)) as second:
        routers = f"{address_of(first)},{address_of(second)}"
        run("route", "--routers", address_of(second), "--tokens", ids, "--request-id", "r-9")
        code, out, err = run("explain", "r-9", "--routers", routers)

        assert (code, err) == (0, "")
        assert f"request r-9, attempt 1, router {address_of(second)}" in out
        assert address_of(first) not in out
        assert "pair_1" in out
        assert "pair_2" in out
        assert "by LESS_LOADED: Both of the pair" in out
        assert "over 1 blocks, 1300 prompt tokens" in out


def test_a_prompt_is_explained_by_all_and_books_nothing(run: Run, ids: str) -> None:
    """Two routers with the same ring see the same pair, and say so."""
    with running_router(pool_of(3)) as first, running_router(pool_of(3)) as second:
        routers = f"{address_of(first)},{address_of(second)}"
        code, out, _ = run("explain", "--tokens", ids, "--routers", routers)
        _, said, _ = run("explain", "--tokens", ids, "--routers", routers, "--json")
        answers = json.loads(said)["routers"]

        assert code == 0
        assert "all 2 routers see the same pair" in out
        assert list(answers) == routers.split(",")
        assert {tuple(c["instance_id"] for c in one["candidates"]) for one in answers.values()} != set()
        assert bookings(first) + bookings(second) == 0


def test_routers_that_differ_are_shown_to_differ(run: Run, ids: str) -> None:
    """Other members, another pair: the difference is named, with its likely cause."""
    with running_router(pool_of(8)) as first, running_router(pool_of(1)) as second:
        routers = f"{address_of(first)},{address_of(second)}"
        code, out, _ = run("explain", "--tokens", ids, "--routers", routers)

    assert code == 0
    assert "the routers see different pairs" in out


def test_a_silent_router_is_named_beside_the_answers(run: Run, ids: str) -> None:
    """What is known is shown; what is missing is one line."""
    with nobody() as dead, running_router(pool_of(2)) as router:
        code, out, err = run("explain", "--tokens", ids, "--routers", f"{dead},{address_of(router)}")

    assert code == 0
    assert "pair_1" in out
    assert err == f"dualmap: router {dead} does not answer; is it running, and is the address right?\n"


def test_failures_are_one_line_and_a_code(run: Run) -> None:
    """A request nobody remembers, nobody there, both or neither subject."""
    with nobody() as dead, running_router(pool_of(2)) as router:
        for words, expected, says in (
            (("never", "--routers", address_of(router)), 1, "no router remembers request 'never'"),
            (("never", "--routers", dead), 1, "does not answer"),
            (("never", "--text", "hi"), 2, "either a request id or a prompt"),
            ((), 2, "either a request id or a prompt"),
            (("--hashes", "1,2,3", "--prompt-tokens", "5", "--routers", address_of(router)), 1, "prompt_tokens"),
        ):
            code, out, err = run("explain", *words)

            assert (code, out) == (expected, ""), err
            assert err.count("\n") == 1
            assert says in err
