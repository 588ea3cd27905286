"""What a training takes adds up. Against real trainings it is held in tests/train/test_resource_estimate.py."""

from __future__ import annotations

from outrider.costs.training import Memory


def test_the_peak_is_the_larger_of_three_phases() -> None:
    def peak(**changes: int) -> int:
        return Memory(**dict.fromkeys(Memory.__dataclass_fields__, 1) | changes).peak

    assert peak(target_pass=100) == 4 + 1 + 100
    assert peak(activations=100) == 4 + 1 + 1 + 100
    assert peak(optimizer_step=100) == 4 + 1 + 100
