"""Pruned draft vocabularies: the most frequent tokens, known by their content."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from outrider.common import BadInputError
from outrider.heads.vocabulary import most_frequent
from outrider.lab.vocabulary_pruning import Vocabulary, digest_tokens, ranks, usual_sizes

COUNTS = torch.tensor([5, 0, 3, 3, 9, 0])  # by frequency: 4, 0, 2, 3 (equal counts: the lower id first), 1, 5


def test_a_vocabulary_is_the_one_that_drafters_keep() -> None:
    for size in range(1, 7):
        assert Vocabulary.of(COUNTS, size).token_ids.tolist() == most_frequent(COUNTS, size, "x").tolist()
    assert Vocabulary.of(COUNTS, 3).token_ids.tolist() == [0, 2, 4]


def test_coverage_is_the_share_of_what_was_counted() -> None:
    assert [Vocabulary.of(COUNTS, size).coverage for size in (1, 2, 3, 4, 6)] == pytest.approx(
        [9 / 20, 14 / 20, 17 / 20, 1.0, 1.0]
    )


def test_ranks_are_nested_vocabularies() -> None:
    for size in range(1, 7):
        assert (ranks(COUNTS) < size).nonzero()[:, 0].tolist() == Vocabulary.of(COUNTS, size).token_ids.tolist()


def test_equal_contents_have_equal_digests_and_no_others() -> None:
    """Not the counts decide, but which tokens they put first."""
    assert (
        Vocabulary.of(COUNTS, 3).digest == Vocabulary.of(COUNTS * 7, 3).digest == digest_tokens(torch.tensor([4, 0, 2]))
    )
    assert Vocabulary.of(COUNTS, 3).digest != Vocabulary.of(COUNTS, 4).digest
    assert Vocabulary.of(COUNTS, 3).digest != Vocabulary.of(COUNTS.flip(0), 3).digest
    # Written once and for all: saved digests must stay comparable.
    assert digest_tokens(torch.tensor([1, 0])) == hashlib.sha256(struct.pack("<2q", 0, 1)).hexdigest()


def test_sizes_are_powers_of_two_the_whole_and_what_is_asked_for() -> None:
    assert usual_sizes(1000, [300]) == [8, 16, 32, 64, 128, 256, 300, 512, 1000]
    assert usual_sizes(3) == [1, 2, 3]


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(BadInputError, match=f"between 1 and the target's 6 tokens, found {size}"):
        Vocabulary.of(COUNTS, size)


def test_nothing_counted_is_refused() -> None:
    with pytest.raises(BadInputError, match="not one token"):
        Vocabulary.of(torch.zeros(6, dtype=torch.long), 2)
