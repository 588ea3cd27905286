"""A target, batches of it, drafters with weights that matter, and their logits round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder, Plan, Sampling
from outrider.heads import Drafter, NodeSession, Proposal, Session, TargetBatch
from outrider.heads.block.block_losses import Anchors, decay_weights
from outrider.heads.divergences import DIVERGENCES
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.heads.session import greedy_chain
from outrider.targets import RowLengths, Target

from ..closeness import assert_same

VOCAB = 64


@pytest.fixture
def target(request, tiny_llama) -> Target:
    """A target of six layers, or of as many as a module's `LAYERS` says."""
    return Target(tiny_llama(layers=getattr(request.module, "LAYERS", 6)))


def sequences(rows: int = 3, length: int = 18, vocab: int = VOCAB) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def batch(target: Target, drafter: Drafter, tokens: Tensor, supervised: Tensor | None = None) -> TargetBatch:
    """Return a batch in which all tokens are learned, if it is not said which."""
    out = target.forward(tokens, taps=drafter.taps)
    learned = torch.ones_like(tokens, dtype=torch.bool) if supervised is None else supervised
    return TargetBatch(target, tokens, learned, out.hidden, out.last)


def features(target: Target, drafter: Drafter, tokens: Tensor) -> Tensor:
    """Return the hidden states that a drafter reads."""
    hidden = target.forward(tokens, taps=drafter.taps).hidden
    assert hidden is not None
    return hidden


def part_of(data: TargetBatch, rows: slice, length: int | None = None, seed: int = 0) -> TargetBatch:
    """Return rows of a batch, up to a length."""
    part = rows, slice(0, length)
    hidden = None if data.hidden is None else data.hidden[part]
    return TargetBatch(data.target, data.tokens[part], data.supervised[part], hidden, data.last[part], seed)


def made(kind: type[Drafter], target: Target, std: Mapping[str, float] | None = None, **settings: Any) -> Any:
    """Return a frozen drafter, always the same, whose norms are not at 1, so that one in the wrong place shows.

    `std`: of weights that are drawn anew, by a part of their names; "" is of all.
    """
    torch.manual_seed(7)
    drafter = kind.build(kind.config_class(**settings), target, torch.randint(0, 1000, (target.vocab_size,)))
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        for part, deviation in (std or {}).items():
            if part in name:
                torch.nn.init.normal_(weight, std=deviation)
    return drafter.eval().requires_grad_(False)


def ragged(texts: list[list[int]], fill: int = 0) -> tuple[Tensor, RowLengths]:
    """Return texts of different lengths as tokens, padded on the right, and their lengths."""
    width = max(map(len, texts))
    return torch.tensor([t + [fill] * (width - len(t)) for t in texts]), RowLengths.of([len(t) for t in texts], "cpu")


def opened(drafter: Drafter, target: Target, texts: list[list[int]]) -> Any:
    """Return a session that has read texts at once."""
    session: Session = drafter.open(target, len(texts), 120)
    tokens, counts = ragged(texts)
    session.update(tokens, target.forward(tokens, taps=drafter.taps).hidden, counts)
    return session


def best(logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Return the most probable tokens."""
    top = logits.argmax(-1)
    return top if token_ids is None else token_ids[top]


def chained(session: NodeSession, roots: list[int], depth: int, choose: Callable[[Tensor], Tensor]) -> Proposal:
    """Return the chain that a session drafts, of target ids that `choose` picks from logits `[B, V']`."""
    session.round_depth = depth
    tokens = [choose(session.prefill(torch.tensor(roots)))]
    while len(tokens) < depth:
        tokens.append(choose(session.decode(tokens[-1][:, None])[:, 0]))
    return Proposal.chain(torch.stack(tokens, 1), session.lengths)


def proposed(session: Session, roots: list[int], depth: int) -> list[list[int]]:
    """Return the tokens that each row proposes greedily."""
    proposal = greedy_chain(session, torch.tensor(roots), depth)
    return [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)]


def looked_up(drafter: Drafter, texts: list[list[int]], roots: list[int], depth: int) -> list[list[int]]:
    """Return what a drafter without weights proposes after texts, whose padding is 99."""
    session = drafter.open(None, len(texts), 100)
    tokens, counts = ragged(texts, 99)
    session.update(tokens, None, counts)
    assert drafter.abilities.deterministic
    return proposed(session, roots, depth)


def check_metrics(
    metrics: Mapping[str, tuple[Tensor, Tensor]], alphas: Mapping[tuple[int, int, int], float], depths: int
) -> None:
    """Compare `alpha_d1` and `tau` with α by row, place and depth."""
    sums = {name: (total.item(), count.item()) for name, (total, count) in metrics.items()}
    first = [alpha for (_, _, depth), alpha in alphas.items() if depth == 0]
    assert_same(sums["alpha_d1"], (sum(first), len(first)))
    assert_same(sums["tau"], tau_of(alphas, depths))


def tau_of(alphas: Mapping[tuple[int, int, int], float], depths: int) -> tuple[float, int]:
    """Return (sum, count) of 1 + Σ_d Π_{i<=d} α_i over whole chains, from α by row, place and depth."""
    starts = {(row, t) for row, t, _ in alphas}
    whole = [(row, t) for row, t in starts if all((row, t, d) in alphas for d in range(depths))]
    chains = [torch.tensor([alphas[row, t, d] for d in range(depths)]) for row, t in whole]
    return sum(1 + float(chain.cumprod(0).sum()) for chain in chains), len(chains)


def assert_sum_of_rows(drafter: Drafter, target: Target) -> None:
    """Rows one by one, padded, or together draw the same and have the same loss; another seed draws other things."""
    supervised = torch.arange(30) < torch.tensor([[18], [25], [30]])
    data = batch(target, drafter, sequences(3, 30).masked_fill(~supervised, 0), supervised)

    def loss(rows: slice, length: int, seed: int = 0) -> float:
        return float(drafter.loss(part_of(data, rows, length, seed)).total)

    whole, last = loss(slice(0, 3), 30), loss(slice(2, 3), 30)
    assert_same(whole, loss(slice(0, 1), 18) + loss(slice(1, 2), 27) + last)
    assert_same(whole, loss(slice(0, 2), 25) + last)
    assert abs(whole - loss(slice(0, 3), 30, seed=1)) > 1e-3


def assert_rounds_have(
    expected: Callable[[int, int, int], Tensor],
    drafter: Drafter,
    target: Target,
    tokens: Tensor,
    starts: list[list[int]],
    steps: int,
) -> None:
    """Compare `decoded_logits` with those of `expected(round, row, depth)`."""
    for number, logits in enumerate(decoded_logits(drafter, target, tokens, starts, steps)):
        assert len(logits) == steps
        for row, depth in product(range(len(tokens)), range(steps)):
            where = f"round {number}, row {row}, depth {depth + 1}"
            assert_same(logits[depth][row], expected(number, row, depth), msg=where)


def assert_later_steps_are_those_of_whole_rows(unroll: Callable[[Tensor], list[Tensor]], length: int) -> None:
    """Rows that begin at different places give what they give when unrolled whole."""
    whole = unroll(torch.tensor([0, 0, 0]))
    for begins in (torch.tensor([2, 0, 5]), torch.tensor([4, 3, 5])):
        for step, output in enumerate(unroll(begins)):
            assert output.shape[1] == length - int(begins.min())
            for row, b in enumerate(begins.tolist()):
                here = length - b - 1 - step
                assert_same(output[row, :here], whole[step][row, b : b + here])


def assert_reads_up_to(
    unroll: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, hidden: Tensor, last: int, whole: bool = False
) -> None:
    """Index t of one row's outputs depends on hidden states up to t, and on tokens up to t + `last`.

    `whole`: the last `last` depend on hidden states, too.
    """
    before = unroll(tokens, hidden)
    at = 9
    length = tokens.shape[1]
    other, moved = tokens.clone(), hidden.clone()
    other[0, at] = (other[0, at] + 1) % VOCAB
    moved[0, at] += 1
    cases = (unroll(other, hidden), last, length - last), (unroll(tokens, moved), 0, length - last * (not whole))
    for after, reach, here in cases:
        changed = (after - before).abs().amax(-1)[0] > 0
        assert changed.tolist()[:here] == [t + reach >= at for t in range(here)]


def anchored(places: list[list[int]]) -> Anchors:
    """Return blocks at these places of each row."""
    found = torch.tensor(places)
    spans = tuple((min(column), max(column)) for column in zip(*places, strict=True))
    return Anchors(found, torch.ones_like(found, dtype=torch.bool), spans)


_ANSWERS = ((0, 5, 12), (1, 3, 8))  # rows, and the places at which their answers begin and end


def answered_twice() -> tuple[Tensor, Tensor]:
    """Two texts, and where their answers are."""
    tokens, supervised = sequences(2, 14), torch.zeros(2, 14, dtype=torch.bool)
    for row, begin, end in _ANSWERS:
        supervised[row, begin:end] = True
    return tokens, supervised


def loss_by_loops(
    target: Target, drafter: Any, tokens: Tensor, block_logits: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Any, int, int]:
    """The loss of blocks of five drafts, scored twice, on `answered_twice`; how many labels were scored, and were not.

    `block_logits(target, drafter, tokens, row, place)`: a block's logits by either score, `[k, V']` each.
    """
    config = drafter.config
    target_logits = target.model(tokens).logits
    kept = drafter.token_ids
    total = 0.0
    learned = 0
    dropped = 0
    for row, begin, end in _ANSWERS:
        sums = weights = 0.0
        for a in range(begin, end - 1):
            both = block_logits(target, drafter, tokens, row, a)
            run = [j for j in range(1, 6) if a + j < end]
            values, right = [], []
            for j in run:
                p, value = target_logits[row, a + j - 1][kept], 0.0
                for logits in (one[j - 1] for one in both):
                    known = logits.isfinite()
                    q, label = logits.log_softmax(-1), (kept == tokens[row, a + j]).nonzero().flatten()
                    there = bool(len(label)) and bool(known[label[0]])
                    if config.loss == "hard_ce":
                        value -= float(q[label[0]]) if there else 0.0
                    else:
                        value += float(DIVERGENCES[config.loss](p[known].log_softmax(-1)[None], q[known][None]))
                learned, dropped = learned + there, dropped + (not there)
                values.append(value)
                right.append(0.5 + 0.5 * float(q[label[0]].exp()) if there else 0.5)
            products = [torch.tensor(right[:m]).prod().item() for m in range(1, len(run) + 1)]
            for i, value in enumerate(values):
                fixed = float(decay_weights(5, config.gamma)[i]) if config.weighting == "decay" else 1.0
                sums += value * (fixed if config.weighting == "decay" else sum(products[i:]))
                weights += fixed
        total += (end - begin) * sums / weights
    return total, learned, dropped


def assert_drafts_are_candidates(
    target: Target, drafter: Drafter, plan: Plan, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a drafter's logits leave `count` tokens at each place, in whole rounds."""
    session_class, seen = type(opened(drafter, target, [[1]])), list[Tensor]()
    honest = session_class.following

    def watched(session: Any, *arguments: Any) -> Tensor:
        seen.append(honest(session, *arguments))
        return seen[-1]

    monkeypatch.setattr(session_class, "following", watched)
    out = Decoder(target, drafter).generate([[1, 2, 3], [4]], 16, Sampling(1.0, seed=1), plan, ignore_eos=True)
    assert len(out.tokens[0]) == 16
    assert all((logits.isfinite().sum(-1) == count).all() for logits in seen)


def rolled(places: list[tuple[int, int]], rows: int, size: int = 256) -> Rollouts:
    """The same masks, (anchor, depth), in every row."""
    return Rollouts.of([places] * rows, size, "cpu")


def every(length: int, steps: int) -> list[tuple[int, int]]:
    """All masks of a text."""
    return [(t, d) for t in range(length) for d in range(1, steps)] or [(0, 1)]


def entries_of(rollouts: Rollouts, learned: Tensor, row: int) -> list[tuple[int, int, int]]:
    """The entries of a row that learn, by anchor, depth and index: those of its text, and its masks."""
    entries = [(t, 0, t) for t in learned[row].nonzero().flatten().tolist()]
    masks = rollouts.real[row].nonzero().flatten().tolist()
    return entries + [
        (int(rollouts.anchors[row, e]), int(rollouts.depths[row, e]), learned.shape[1] + e) for e in masks
    ]


def decoded_logits(
    drafter: Drafter, target: Target, tokens: Tensor, starts: list[list[int]], steps: int
) -> list[list[Tensor]]:
    """Return logits `[B, V']` by round and depth, teacher forced.

    Row b's rounds begin after `starts[b][round]` absorbed tokens.
    """
    rows, hidden = torch.arange(len(tokens)), target.forward(tokens, taps=drafter.taps).hidden
    state, found = drafter.open(target, len(tokens), tokens.shape[1] + steps), []
    committed = torch.zeros(len(tokens), dtype=torch.long)
    for reached in torch.tensor(starts).T:
        counts = reached - committed
        # As in the decoder: rows are padded with drafts that were thrown away, here with another place's tokens.
        width = int(counts.max()) + 1
        where = (committed[:, None] + torch.arange(width)).clamp(max=tokens.shape[1] - 1)
        states = None if hidden is None else hidden[rows[:, None], where]
        state.update(tokens[rows[:, None], where], states, RowLengths.of(counts.tolist(), "cpu"))
        state.round_depth = steps
        logits = [state.prefill(tokens[rows, reached])]
        while len(logits) < steps:
            drafted = tokens[rows, reached + len(logits)]
            logits.append(state.decode(drafted[:, None])[:, 0])
        found.append(logits)
        committed = reached
    return found
