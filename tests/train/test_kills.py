"""SIGKILL at random moments of a whole training costs at most an interval of checkpoints, and changes nothing.

Kills of several processes at once are in test_launches.py, those of answering in tests/distill/test_kills.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.targets import Target

from .kills import INTERVAL, attack


@pytest.mark.slow
def test_fifty_kills_in_all_phases_end_as_a_training_without_kills(tmp_path: Path) -> None:
    """Bit for bit: responses, hidden states, checkpoints, the drafter and all losses."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    *_, found = attack(target, tmp_path, 50, seed=1)
    assert found.failures == []
    assert found.count >= 50
    assert min(found.kills.values()) >= 5, found.kills
    assert max(found.lost) <= INTERVAL
