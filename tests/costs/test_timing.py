"""Pieces of work take turns."""

from __future__ import annotations

from outrider.costs.timing import turns


def test_turns_rotate_and_the_warm_up_does_not_count() -> None:
    found = list(turns("abc", 3))
    counted = ["".join(key for key, counts in found[i : i + 3] if counts) for i in range(0, len(found), 3)]
    assert [turn for turn in counted if turn] == ["abc", "bca", "cab"]
    assert counted[:2] == ["", ""]
