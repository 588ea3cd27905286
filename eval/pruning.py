"""What a pruned draft vocabulary costs in acceptance, whatever the drafter: measured with the target's distribution.

A drafter whose outputs are a set K proposes nothing outside it. With p the target's distribution, Σ min(p, q) <= p(K)
for every q on K, and q = p / p(K) reaches it: so 1 − p(K), the mass outside, is the acceptance that pruning takes from
a perfect drafter at temperature 1. At temperature 0 it is the share of positions whose most probable token lies
outside.

Shapes: B rows, T tokens, V vocabulary, P positions, S sizes, N rows in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..targets import Target
from .reports.statistics import Floats


def measure_pruning(
    target: Target, batches: Iterable[tuple[Tensor, Tensor]], ranks: Tensor, sizes: Sequence[int], chunk: int = 256
) -> tuple[Floats, Floats]:
    """Return sums over the supervised positions of each row.

    Args:
        batches: tokens `[B, T]`, padded on the right, and which of them count `[B, T]` bool.
        ranks: of each token its place by frequency, `[V]`; a vocabulary of size s holds the ranks below s.
        chunk: positions whose logits exist at a time.

    Returns:
        `[3, S, N]`: tokens inside, probability outside, most probable tokens outside; and the number of positions
        `[N]`.
    """
    found, counts = [], []
    device = target.device
    for tokens, supervised in batches:
        sums, count = _sums(target, tokens.to(device), supervised.to(device), ranks.to(device), sizes, chunk)
        found.append(sums)
        counts.append(count)
    return np.concatenate(found, -1), np.concatenate(counts)


def _sums(
    target: Target, tokens: Tensor, supervised: Tensor, ranks: Tensor, sizes: Sequence[int], chunk: int
) -> tuple[Floats, Floats]:
    wanted = supervised[:, 1:]
    rows = wanted.nonzero()[:, 0]
    with torch.no_grad():
        hidden = target.forward(tokens, logits=False).last[:, :-1][wanted]
        sums = torch.zeros(3, len(sizes), len(tokens), dtype=torch.float64, device=tokens.device)
        for begin in range(0, len(rows), chunk):
            part = slice(begin, begin + chunk)
            values = _positions(target.lm_head(hidden[part]).float(), tokens[:, 1:][wanted][part], ranks, sizes)
            sums.index_add_(2, rows[part], values)
    return sums.cpu().numpy(), wanted.sum(1).double().cpu().numpy()


def _positions(logits: Tensor, following: Tensor, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the three figures of each position, `[3, S, P]`.

    Args:
        logits: `[P, V]`. following: the tokens that followed, `[P]`.
    """
    limits = torch.tensor(sizes, device=logits.device)[:, None]
    order = ranks.argsort()
    # From the rarest token on, so that small masses are sums of small numbers.
    masses = logits.softmax(-1)[:, order].flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
    tail = torch.nn.functional.pad(masses, (0, 1))
    inside = (ranks[following] < limits).double()
    best_outside = (ranks[logits.argmax(-1)] >= limits).double()
    return torch.stack([inside, tail[:, limits[:, 0]].T, best_outside])
