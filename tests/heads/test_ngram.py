"""Prompt lookup by hand: the longest suffix that occurred before, its last occurrence, copied."""

from __future__ import annotations

import pytest
import torch

from outrider.heads import Ngram, NgramConfig
from outrider.targets import RowLengths

from .conftest import looked_up


def propose(texts: list[list[int]], roots: list[int], depth: int, **config: int) -> list[list[int]]:
    return looked_up(Ngram(NgramConfig(**config)), texts, roots, depth)


def test_the_longest_suffix_wins_over_a_later_shorter_one():
    assert propose([[1, 2, 3, 4, 9, 3, 7, 1, 2]], [3], 2) == [[4, 9]]


def test_of_equal_suffixes_the_last_occurrence_wins():
    assert propose([[5, 1, 5, 2, 6]], [5], 1) == [[2]]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert propose([[1, 2, 3, 1, 2]], [3], 7) == [[1, 2, 3, 1, 2, 3, 1]]
    assert propose([[4, 4]], [4], 3) == [[4, 4, 4]]


def test_rows_propose_as_much_as_they_find():
    """Padding after a row's own tokens is never looked up."""
    assert propose([[1, 2, 3], [7, 8, 7, 9], [5]], [9, 8, 99], 2) == [[], [7, 9], []]


def test_nothing_found_in_any_row_is_an_empty_proposal():
    assert propose([[1, 2], [3]], [9, 8], 4) == [[], []]


@pytest.mark.parametrize(("min_match", "found"), [(1, [[2, 3]]), (2, [[]])])
def test_matches_shorter_than_min_match_do_not_count(min_match, found):
    assert propose([[1, 2, 3, 4]], [1], 2, min_match=min_match) == found


def test_rejected_drafts_are_forgotten_and_rows_can_be_dropped():
    drafter = Ngram()
    state = drafter.open(None, 2, 100)
    state.update(torch.tensor([[1, 2], [3, 4]]), None, RowLengths.of([2, 2], "cpu"))
    state.update(torch.tensor([[5, 6, 7], [8, 9, 1]]), None, RowLengths.of([1, 3], "cpu"))
    state.select([1])
    assert state.propose(torch.tensor([8]), 3, None).tokens.tolist() == [[9, 1, 8]]
    assert state.rows[0].tokens == [3, 4, 8, 9, 1]
