"""Every guarantee of the algorithm and every defect of the published release has tests that hold it: which, by name.

The same table is printed in docs/results/simulator.md; a test that is renamed must be renamed here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GUARANTEES = {
    "the same prefix has the same pair in any process and any order of members": (
        "core/test_ring.py::test_another_process_gives_the_same_pairs",
        "core/test_ring.py::test_the_pair_does_not_depend_on_the_order_of_members",
    ),
    "the two of a pair differ whenever two instances are eligible": (
        "core/test_ring.py::test_two_candidates_differ_whenever_two_are_eligible",
    ),
    "a join or leave changes about 1/(n+1) of each ring's owners, and only to (from) that instance": (
        "core/test_ring.py::test_a_join_moves_its_fair_share_and_only_to_the_newcomer",
        "core/test_ring.py::test_from_eight_to_nine_instances_most_pairs_stay_whole",
    ),
    "of m requests sharing a prefix at least 1 - 2/m hit it": (
        "simulator/test_guarantees.py::test_of_m_requests_sharing_a_prefix_at_most_two_miss_it",
    ),
    "two choices balance fresh prefixes, one does not": (
        "core/test_ring.py::test_two_choices_balance_fresh_prefixes_and_one_does_not",
        "core/test_choose.py::test_new_prefixes_balance_over_both_rings",
    ),
    "cost of a decision and state read for it do not grow with n": (
        "core/test_ring.py::test_the_cost_of_a_pair_does_not_grow_with_the_pool",
        "core/test_choose.py::test_state_read_per_decision_does_not_grow_with_n",
    ),
}

DEFECTS = {
    "1 a request migrated while it arrives goes to its old destination": (
        "simulator/test_guarantees.py::test_what_is_moved_while_it_arrives_is_where_it_was_moved_to",
        "services/instanceagent/test_handover.py::test_hundreds_of_requests_moved_to_and_fro_each_end_exactly_once",
    ),
    "2 an answer without text never ends its prefill": (
        "core/test_engine_model.py::test_an_answer_without_text_ends_its_prefill",
    ),
    "3 a fully cached prompt counts as a full miss": (
        "core/test_engine_model.py::test_a_fully_cached_prompt_is_no_miss",
        "core/test_choose.py::test_a_fully_cached_prompt_is_no_miss",
        "core/test_rebalance.py::test_a_prompt_wholly_cached_at_the_target_moves_alone",
    ),
    "4 work in flight is seen late, and arrivals in between herd": (
        "core/test_choose.py::test_a_decision_is_seen_by_the_next_one_at_once",
        "core/test_choose.py::test_booked_blocks_are_future_hits",
        "simulator/test_cluster.py::test_bookings_keep_routers_from_herding_on_old_state",
    ),
    "5 a dead instance looks idle and warm": (
        "simulator/test_cluster.py::test_a_dead_instance_attracts_nothing",
        "core/test_choose.py::test_an_ineligible_candidate_is_skipped_on_the_ring",
        "services/statecollector/test_polling.py::test_a_dead_agent_is_unreachable_at_once_and_returns",
    ),
    "6 [1, 23] and [12, 3] are one key": ("core/test_blocks.py::test_ids_cannot_be_joined_into_another_prompt",),
    "7 eviction takes roots first, and loops for ever on an empty cache": (
        "core/test_engine_model.py::test_eviction_takes_the_leaves_first",
        "core/test_engine_model.py::test_evicting_from_an_empty_cache_ends",
    ),
    "8 expired requests are never discarded, and discarding breaks the heap": (
        "core/test_waiting.py::test_who_waited_too_long_is_shed",
        "core/test_waiting.py::test_nothing_is_lost_and_nothing_twice",
        "services/instanceagent/test_submit.py::test_who_waits_too_long_is_told",
    ),
    "9 a decision re-seeds the global random generator": (
        "core/test_choose.py::test_deciding_draws_nothing_at_random",
        "simulator/test_cluster.py::test_equal_inputs_give_equal_runs_bit_for_bit",
    ),
    "10 no health check, no retry, no shedding, a timeout of 100 hours": (
        "services/statecollector/test_service.py::test_health_names_its_components",
        "client/test_run.py::test_a_failure_before_the_first_token_goes_to_the_backup",
        "services/router/test_overload.py::test_calls_over_the_limit_are_shed_with_a_delay_and_the_rest_served",
        "client/test_run.py::test_a_request_ends_with_its_callers_time",
    ),
}


@pytest.mark.parametrize("what", [*GUARANTEES, *DEFECTS])
def test_each_names_tests_that_are_there(what: str) -> None:
    """A guarantee without a test is a wish."""
    for named in (GUARANTEES | DEFECTS)[what]:
        file, _, name = named.partition("::")
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), named


def test_the_page_of_results_prints_the_same_table() -> None:
    """Readers find it without the source."""
    page = (ROOT / "docs" / "results" / "simulator.md").read_text(encoding="utf-8")
    for what, named in (GUARANTEES | DEFECTS).items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
        assert all(f"`{one.partition('::')[2]}`" in row for one in named)
