"""`outrider lab capacity`: whose costs of rounds it takes, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.eval.tuning_record import Tuning
from outrider.lab.capacity import _batches

from ..eval.conftest import make_report, make_tuning


def tuned(*tunings: Tuning) -> Any:
    return SimpleNamespace(folder="the pair", manifest=SimpleNamespace(tuning=list(tunings)))


def test_costs_are_of_the_reports_dtype_machine_and_nearest_temperature() -> None:
    """A pair that was tuned at one size after another has a record for each."""
    report = make_report([[1, 2]] * 3)
    other = [make_tuning({1: 3, 2: 3, 4: 3}, **changed) for changed in ({"dtype": "bfloat16"}, {"temperature": 1.0})]
    apart = [make_tuning({size: 3}) for size in (1, 8)]
    machine, batches = _batches(tuned(*other, *apart, make_tuning({1: 3, 2: 3}, device_name="another")), report)
    assert (machine, [b.batch_size for b in batches]) == ("a CPU", [1, 8])
    machine, batches = _batches(tuned(make_tuning({1: 3}, device_name="the only one")), report)
    assert machine == "the only one"


def test_costs_of_nowhere_in_particular_are_refused() -> None:
    report = make_report([[1, 2]] * 3)
    with pytest.raises(BadInputError, match="the costs of rounds in float32 are not known; run `outrider tune"):
        _batches(tuned(make_tuning({1: 3}, dtype="bfloat16")), report)
    with pytest.raises(BadInputError, match="was tuned on x, y, and the report is of a CPU"):
        _batches(tuned(*(make_tuning({1: 3}, device_name=name) for name in "xy")), report)
