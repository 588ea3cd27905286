"""Confidences and their temperatures: by hand, by brute force, and through the real decoder."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Sampling
from outrider.heads import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.lab.confidence_calibration import ConfidenceSample, bins_of, calibration_error, collect, fit
from outrider.targets import Target


def drawn(rounds: int, temperatures: tuple[float, ...], seed: int = 0) -> ConfidenceSample:
    """Rounds whose true odds are those that are told, divided by `temperatures`."""
    generator = np.random.default_rng(seed)
    odds = generator.normal(1.0, 2.0, (rounds, len(temperatures)))
    right = generator.random(odds.shape) < 1 / (1 + np.exp(-odds / np.array(temperatures)))
    return ConfidenceSample(odds, right.cumprod(1).sum(1))


def test_the_calibration_error_by_hand():
    said, true = np.array([0.1, 0.12, 0.9, 0.95]), np.array([False, True, True, True])
    assert [b.count for b in bins_of(said, true)] == [2, 2]
    assert calibration_error(said, true) == pytest.approx(0.5 * abs(0.11 - 0.5) + 0.5 * abs(0.925 - 1))


def test_temperatures_that_were_put_in_are_found():
    told = drawn(40_000, (2.0, 0.5, 1.0))
    found = fit(told)
    assert found.temperatures == pytest.approx((2.0, 0.5, 1.0), rel=0.15)
    assert max(found.after) < 0.02 < max(found.before)
    assert found.rounds == 40_000


def test_each_temperature_is_the_best_for_the_product_so_far():
    """Brute force over the same grid, those before it fixed."""
    told, grid = drawn(400, (1.5, 0.7), seed=3), (0.5, 0.8, 1.0, 1.25, 2.0)
    found = fit(told, grid)
    first = min(told.error([t]) for t in grid)
    assert told.error(found.temperatures[:1]) == first
    assert told.error(found.temperatures) == min(told.error([found.temperatures[0], t]) for t in grid)
    assert min(told.error(list(both)) for both in product(grid, repeat=2)) <= told.error(found.temperatures)


def test_believed_products_add_up_to_what_is_accepted():
    """Σ of calibrated products over rounds is the number of accepted drafts, as a mean."""
    told = drawn(40_000, (2.0, 0.5, 1.0))
    promised = told.reached(fit(told).temperatures).sum(1).mean()
    deviation = told.accepted.std() / len(told.accepted) ** 0.5
    assert abs(promised - told.accepted.mean()) < 4 * deviation + 0.02


def test_without_rounds_there_is_nothing_to_fit():
    with pytest.raises(BadInputError, match="without rounds"):
        fit(ConfidenceSample(np.zeros((0, 3)), np.zeros(0)))


def test_what_is_collected_is_what_the_decoder_was_told(tiny_llama):
    target = Target(tiny_llama(layers=6))
    torch.manual_seed(3)
    drafter = DSpark.build(
        DSparkConfig(num_layers=1, block_size=3, markov_rank=4, temperatures=(2.0, 2.0, 2.0)), target
    )
    told = collect(target, drafter.eval(), [[1, 2, 3], [4, 5]], 12, Sampling(0.0))
    assert told.odds.shape == (len(told.accepted), 3)
    assert len(told.accepted) >= 6
    assert drafter.config.temperatures == (2.0, 2.0, 2.0)
    assert "session_class" not in vars(drafter)
    for weight in drafter.confidence_head.parameters():
        torch.nn.init.zeros_(weight)
    assert not collect(target, drafter, [[1, 2, 3]], 12, Sampling(0.0)).odds.any()
    with pytest.raises(BadInputError, match="says nothing of how sure it is"):
        collect(target, DFlash.build(DFlashConfig(num_layers=1), target), [[1]], 4, Sampling(0.0))
