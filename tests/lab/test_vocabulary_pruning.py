"""The acceptance that a pruned draft vocabulary loses, by the target's own distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.heads.losses import TargetDistribution, compare, divergence
from outrider.lab.vocabulary_pruning import measure_pruning, ranks, size_figures
from outrider.targets import Target

from ..closeness import assert_same, both_precisions

VOCAB, SIZES = 64, [1, 16, 40, 64]


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2, vocab=VOCAB, initializer_range=0.6))


@pytest.fixture(scope="module")
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two batches; rows of several lengths, of which the last tokens count."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (rows, 12), generator=generator) for rows in (3, 2)]
    lengths = [torch.tensor([12, 9, 12]), torch.tensor([7, 12])]
    place = torch.arange(12)
    return [(t, (place >= 4) & (place < n[:, None])) for t, n in zip(tokens, lengths, strict=True)]


COUNTS = torch.arange(VOCAB).roll(11)


@both_precisions
def test_sums_are_those_of_the_targets_distribution_position_by_position(target, batches):
    """Written out in double precision, without ranks, chunks or batches."""
    sums, counts = measure_pruning(target, batches, ranks(COUNTS), SIZES, chunk=5)
    expected = np.zeros((3, len(SIZES), 5))
    row = 0
    for tokens, supervised in batches:
        with torch.no_grad():
            probs = target.model(tokens).logits.double().softmax(-1)
        for b in range(len(tokens)):
            for t in supervised[b].nonzero()[:, 0].tolist():
                p = probs[b, t - 1]
                for s, size in enumerate(SIZES):
                    kept = COUNTS.argsort(descending=True)[:size]
                    expected[:, s, row] += [
                        int(tokens[b, t] in kept),
                        1 - float(p[kept].sum()),
                        int(p.argmax() not in kept),
                    ]
            row += 1
    assert counts.tolist() == [8, 5, 8, 3, 8]
    assert_same(sums.tolist(), expected.tolist())


@both_precisions
def test_what_is_lost_is_what_a_perfect_drafter_on_that_vocabulary_misses(target, batches):
    """A drafter that is the target renormalised on the kept tokens: its analytic alpha is 1 − lost, exactly."""
    sums, counts = measure_pruning(target, batches, ranks(COUNTS), [16])
    kept = COUNTS.argsort(descending=True)[:16].sort().values
    alphas, agreed = [], []
    for tokens, supervised in batches:
        with torch.no_grad():
            logits = target.model(tokens).logits[:, :-1][supervised[:, 1:]]
        _, alpha, top1 = compare(TargetDistribution.of(logits, kept), logits[:, kept], divergence("tv"))
        alphas.append(alpha)
        agreed.append(top1)
    found = size_figures(sums, counts, [(16, "d", 0.5)])[0]
    assert_same(found.alpha_max.value, torch.cat(alphas).mean())
    assert found.lost.value == pytest.approx(1 - found.alpha_max.value)
    assert_same(found.lost_greedy.value, 1 - torch.cat(agreed).mean())
    assert found.lost.low < found.lost.value < found.lost.high


def test_the_whole_vocabulary_loses_nothing(target, batches):
    sums, counts = measure_pruning(target, batches, ranks(COUNTS), SIZES)
    lost = [f.lost.value for f in size_figures(sums, counts, [(s, "d", 0.0) for s in SIZES])]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] == 0.0
    assert (sums[1, 0] > 0).all()
