from __future__ import annotations

import pytest

from mla_decode.demo.measure import (
    Divergence,
    acceptance,
    divergences,
    repeated_share,
)


def test_acceptance_by_position_adds_up_to_the_mean():
    found = acceptance([(3, 0), (1,)], draft_len=3)
    assert found.num_blocks == 3
    assert found.by_position == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert found.per_block == pytest.approx(sum(found.by_position))
    assert found.tokens_per_target_pass == pytest.approx(4 / 3 + 1)


def test_no_blocks_accept_nothing():
    assert acceptance([], draft_len=2).by_position == (0, 0)


def test_a_loop_counts_as_repeats_and_two_texts_do_not():
    assert repeated_share([[1, 2, 1, 2, 1, 2, 1]]) == 0.5
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repeated_share([[1, 2]]) == 0


def test_each_prompt_parts_at_its_first_difference():
    margins = [[0.5, 0.25, 0.125], [0.5, 0.5, 0.5]]
    parted = divergences([[1, 2, 3], [4, 5, 6]], [[1, 9, 9], [4, 5, 6]], margins)
    assert parted == (Divergence(prompt=0, position=1, margin=0.25),)
