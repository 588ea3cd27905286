"""The rules for chains, enumerated exactly: the law of what is emitted is the target's, to rounding.

No statistics: drafts are weighted by q, uniforms run over the midpoints of a grid on which every threshold of the
chosen distributions lies, and the joint law of k + 1 tokens is compared with the target's own in fp64. The second half
plants the bugs that were seen in the field and shows that the enumeration catches each of them.

Shapes: N enumerated cases, k draft tokens, V = 3 symbols (2 in some).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.decode.rules import block, match, rejection
from outrider.decode.sampling import draw

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

EXACT = 1e-12
GRID = 10  # all probabilities, ratios and residuals below are multiples of a tenth


@dataclass(frozen=True)
class Chain:
    """A first-order source: the law of the first token, and of the next one given the last."""

    first: Tensor  # [V]
    rows: Tensor  # [V, V]

    @classmethod
    def of(cls, first: list, rows: list[list] | None = None) -> Chain:
        tensor = torch.tensor(
            [[float(x) for x in row] for row in [first, *(rows or [first] * len(first))]], dtype=torch.float64
        )
        return cls(tensor[0], tensor[1:])

    @property
    def vocab(self) -> int:
        return len(self.first)

    def along(self, tokens: Tensor) -> Tensor:
        """The law at each node of the paths `tokens` `[N, k]`: `[N, k + 1, V]`."""
        return torch.cat([self.first.expand(len(tokens), 1, -1), self.rows[tokens]], 1)

    def weights(self, tokens: Tensor) -> Tensor:
        """Probability of each path `[N, k]`."""
        return self.along(tokens)[:, :-1].gather(2, tokens[:, :, None])[:, :, 0].prod(1)

    def after(self, length: int) -> Tensor:
        """The law of the next `length` tokens given the last one, `[V, V ** length]`."""
        law = torch.ones(self.vocab, 1, dtype=torch.float64)
        for _ in range(length):
            law = (self.rows[:, :, None] * law[None]).flatten(1)
        return law

    def law(self, length: int) -> Tensor:
        """The joint law of the first `length` tokens, `[V ** length]`."""
        return (self.first[:, None] * self.after(length - 1)).flatten()


TARGETS = {
    "three symbols": Chain.of([0.5, 0.3, 0.2], [[0.3, 0.5, 0.2], [0.5, 0.4, 0.1], [0.2, 0.2, 0.6]]),
    "p(x) = 0": Chain.of([0.6, 0.4, 0], [[0, 0.6, 0.4], [0.5, 0.5, 0], [1, 0, 0]]),
    "q(x) = 0": Chain.of([0.5, 0.5, 0], [[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.4, 0.6, 0]]),
}
DRAFTS = {
    "three symbols": Chain.of([0.2, 0.3, 0.5], [[0.5, 0.3, 0.2], [0.3, 0.2, 0.5], [0.4, 0.4, 0.2]]),
    "p(x) = 0": Chain.of([0.2, 0.4, 0.4], [[0.2, 0.4, 0.4], [0.5, 0, 0.5], [0.5, 0.5, 0]]),
    "q(x) = 0": Chain.of([0.5, 0, 0.5], [[0, 0.5, 0.5], [0.3, 0.2, 0.5], [0, 1, 0]]),
}


def paths(symbols: int, length: int) -> Tensor:
    """All sequences over `symbols` symbols, `[symbols ** length, length]`."""
    return torch.tensor(list(product(range(symbols), repeat=length)), dtype=torch.long).reshape(symbols**length, length)


def grid(count: int, size: int = GRID) -> Tensor:
    """All combinations of `count` uniforms on the midpoints of `size` equal cells, `[size ** count, count]`."""
    return (paths(size, count).double() + 0.5) / size


@dataclass
class Cases:
    """Enumerated outcomes: drafts `[N, k]`, accepted and following `[N]`, weights `[N]` that sum to 1."""

    drafts: Tensor
    accepted: Tensor
    following: Tensor
    weights: Tensor

    def mean_accepted(self) -> float:
        return float((self.accepted * self.weights).sum() / self.weights.sum())

    def joint(self, target: Chain) -> Tensor:
        """The law of k + 1 tokens: what was emitted, then what the target alone would say."""
        length, vocab = self.drafts.shape[1] + 1, target.vocab
        law = torch.zeros(vocab**length, dtype=torch.float64)
        for count in range(length):
            here = self.accepted == count
            emitted = torch.cat([self.drafts[here, :count], self.following[here, None]], 1)
            code = (emitted * vocab ** torch.arange(count, -1, -1)).sum(1)
            rest = target.after(length - 1 - count)[self.following[here]] * self.weights[here, None]
            law.view(vocab ** (count + 1), -1).index_add_(0, code, rest)
        return law


def enumerate_rejection(
    rule: Rule,
    target: Chain,
    drawn: Chain,
    k: int,
    scored: Chain | None = None,
    length: int | None = None,
    size: int = GRID,
) -> Cases:
    """One round of `rule`: every draft path, every cell of every uniform. `scored` is the q that the rule is told."""
    drafts, uniforms = paths(target.vocab, k), grid(k + 1, size)
    case, cell = (
        index.flatten()
        for index in torch.meshgrid(torch.arange(len(drafts)), torch.arange(len(uniforms)), indexing="ij")
    )
    drafts, uniforms = drafts[case], uniforms[cell]
    lengths = torch.full((len(drafts),), k if length is None else length)
    accepted, following = rule(
        drafts,
        lengths,
        target.along(drafts),
        (scored or drawn).along(drafts)[:, :-1],
        uniforms[:, :-1],
        uniforms[:, -1],
    )
    return Cases(drafts, accepted, following, drawn.weights(drafts) / size ** (k + 1))


def distance(law: Tensor, expected: Tensor) -> float:
    """Total variation."""
    return float((law - expected).abs().sum() / 2)


# ------------------------------------------------------------ rejection


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_rejection_emits_the_targets_law(name, k):
    cases = enumerate_rejection(rejection, TARGETS[name], DRAFTS[name], k)
    assert float(cases.weights.sum()) == pytest.approx(1, abs=EXACT)
    assert distance(cases.joint(TARGETS[name]), TARGETS[name].law(k + 1)) < EXACT


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_a_row_that_proposes_fewer_tokens_gets_its_bonus_from_p(name, length):
    """Entries after `lengths` mean nothing.

    The token after the last proposed one is no correction, so it has no residual.
    """
    cases = enumerate_rejection(rejection, TARGETS[name], DRAFTS[name], 3, length=length)
    assert int(cases.accepted.max()) <= length
    assert distance(cases.joint(TARGETS[name]), TARGETS[name].law(4)) < EXACT


def test_rows_of_one_batch_are_verified_independently():
    target, drafter, k = TARGETS["three symbols"], DRAFTS["three symbols"], 2
    drafts, uniforms = (
        paths(3, k).repeat(200, 1),
        torch.rand(1800, k + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    lengths = torch.arange(1800) % (k + 1)
    arguments = (
        drafts,
        lengths,
        target.along(drafts),
        drafter.along(drafts)[:, :-1],
        uniforms[:, :-1],
        uniforms[:, -1],
    )
    together = torch.stack(rejection(*arguments))
    alone = torch.cat([torch.stack(rejection(*(a[i : i + 1] for a in arguments))) for i in range(1800)], 1)
    assert torch.equal(together, alone)


def test_q_equal_to_p_accepts_everything():
    cases = enumerate_rejection(rejection, TARGETS["three symbols"], TARGETS["three symbols"], 3)
    assert set(cases.accepted[cases.weights > 0].tolist()) == {3}


def test_a_token_that_the_target_excludes_is_never_emitted():
    """p(x) = 0 with q(x) > 0: not as a draft and not as a correction."""
    target, drafter = Chain.of([0.6, 0.4, 0]), Chain.of([0.2, 0.4, 0.4])
    cases = enumerate_rejection(rejection, target, drafter, 2)
    possible = cases.weights > 0
    assert 2 not in cases.following[possible]
    assert all(
        2 not in drafts[:n]
        for drafts, n in zip(cases.drafts[possible].tolist(), cases.accepted[possible].tolist(), strict=True)
    )


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_refusal_that_only_rounding_explains_is_followed_by_a_draw_from_p(rule):
    """Where p <= q everywhere, a refusal leaves no residual, and the draw is from p.

    That is so in the first row; the second row's residual has nothing to do with it.
    """
    p = torch.tensor([[0.5, 0.25, 0.25 - 1e-7], [0.5, 0.25, 0.25]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64)
    for uniform, expected in ((0.01, [0, 0]), (0.6, [1, 0]), (0.99, [2, 0])):
        high, correct = (
            torch.full((2, 1), 1 - 2.0**-53, dtype=torch.float64),
            torch.full((2,), uniform, dtype=torch.float64),
        )
        accepted, following = rule(
            torch.tensor([[2], [2]]),
            torch.ones(2, dtype=torch.long),
            p[:, None].expand(-1, 2, -1),
            q[:, None],
            high,
            correct,
        )
        assert (accepted.tolist(), following.tolist()) == ([0, 0], expected)


# ------------------------------------------------------------ chains that end where the drafter is unsure


def confident_until(drafts: Tensor, draft_probs: Tensor, threshold: float) -> Tensor:
    """How many drafts `[N, k]` stand before the first to which the drafter gives less than `threshold`, `[N]`."""
    return (draft_probs.gather(2, drafts[:, :, None])[:, :, 0] >= threshold).long().cumprod(1).sum(1)


def ending(rule: Rule, threshold: float, dropped: int = 0) -> Rule:
    """`rule` on chains that end after the first unconfident draft; `dropped` = 1 leaves that one out."""

    def shortened(
        drafts: Tensor, lengths: Tensor, p: Tensor, q: Tensor, accept: Tensor, correct: Tensor
    ) -> tuple[Tensor, Tensor]:
        until = confident_until(drafts, q, threshold) + 1 - dropped
        return rule(drafts, torch.minimum(lengths, until), p, q, accept, correct)

    return shortened


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("three symbols", 0.25), ("three symbols", 0.35), ("three symbols", 0.45), ("p(x) = 0", 0.3)],
)
def test_a_chain_that_ends_behind_an_unconfident_draft_emits_the_targets_law(name, threshold):
    """A chain whose length depends on the drafts themselves has no bias.

    The draft that ends the chain is verified like any other.
    """
    k, target = 3, TARGETS[name]
    possible = paths(3, k)[DRAFTS[name].weights(paths(3, k)) > 0]
    until = confident_until(possible, DRAFTS[name].along(possible)[:, :-1], threshold)
    assert len(set((1 + until).clamp(max=k).tolist())) > 1, "lengths differ"
    cases = enumerate_rejection(ending(rejection, threshold), target, DRAFTS[name], k)
    assert distance(cases.joint(target), target.law(k + 1)) < EXACT


@pytest.mark.parametrize("threshold", [0.25, 0.35, 0.45])
def test_leaving_the_unconfident_draft_out_is_caught(threshold):
    target = TARGETS["three symbols"]
    cases = enumerate_rejection(ending(rejection, threshold, dropped=1), target, DRAFTS["three symbols"], 3)
    assert distance(cases.joint(target), target.law(4)) > 0.01


# ------------------------------------------------------------ match: candidates, greedy, coupled


def rounds_under_shared_noise(
    target: Chain,
    propose: Callable[[Tensor, Tensor], Tensor],
    depth: int,
    length: int,
    until: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return whole generations of `length` tokens by `match`, `[N, length]`.

    There is one per cell of the uniforms that are keyed by position.

    `propose(context [V+1-coded last token, N], uniforms [N, depth]) -> drafts [N, depth]` may look at the same uniforms
    as the target: a position that is not reached in one round meets the same uniform again in the next one.
    `until(context, drafts, accepted in the round before) -> [N]` says how many of the drafts each row keeps; None for
    all.
    """
    uniforms = torch.nn.functional.pad(grid(length), (0, depth + 1), value=0.5)
    law = torch.cat([target.rows, target.first[None]])
    text = torch.full((len(uniforms), length + depth + 1), target.vocab)  # the symbol V stands for "no token yet"
    done, accepted = torch.zeros(len(uniforms), dtype=torch.long), torch.zeros(len(uniforms), dtype=torch.long)
    while int(done.min()) < length:
        last = torch.where(done > 0, text.gather(1, (done - 1).clamp(min=0)[:, None])[:, 0], target.vocab)
        here = uniforms.gather(1, (done[:, None] + torch.arange(depth + 1)).clamp(max=uniforms.shape[1] - 1))
        drafts = propose(last, here[:, :-1])
        nodes = law[torch.cat([last[:, None], drafts], 1)]  # [N, depth + 1, V]
        lengths = torch.full_like(done, depth) if until is None else until(last, drafts, accepted).clamp(max=depth)
        accepted, following = match(drafts, lengths, draw(nodes, here))
        emitted = torch.cat([drafts, following[:, None]], 1).scatter(1, accepted[:, None], following[:, None])
        for j in range(depth + 1):
            keep = (j <= accepted) & (done + j < length)
            text[keep, done[keep] + j] = emitted[keep, j]
        done = torch.minimum(done + accepted + 1, torch.tensor(length))
    return text[:, :length]


def law_of(texts: Tensor, vocab: int) -> Tensor:
    code = (texts * vocab ** torch.arange(texts.shape[1] - 1, -1, -1)).sum(1)
    return torch.bincount(code, minlength=vocab ** texts.shape[1]).double() / len(texts)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_match_with_samples_of_p_emits_the_targets_law_for_any_candidates(name, k):
    """Each deterministic path on its own: it may be as bad as it likes."""
    target, uniforms = TARGETS[name], grid(k + 1)
    for path in paths(3, k):
        drafts = path.expand(len(uniforms), -1)
        accepted, following = match(drafts, torch.full((len(drafts),), k), draw(target.along(drafts), uniforms))
        cases = Cases(drafts, accepted, following, torch.full((len(drafts),), 1 / len(drafts), dtype=torch.float64))
        assert distance(cases.joint(target), target.law(k + 1)) < EXACT


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_uniforms_that_meet_a_position_twice_do_not_bias_it(depth):
    """Candidates: the uniform of a position that a round did not reach is used again in the next round."""
    target = TARGETS["three symbols"]

    def propose(last: Tensor, uniforms: Tensor) -> Tensor:
        return (last[:, None] + torch.arange(1, uniforms.shape[1] + 1)) % 3

    assert distance(law_of(rounds_under_shared_noise(target, propose, depth, 4), 3), target.law(4)) < EXACT


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_coupled_drafts_that_see_the_targets_noise_do_not_bias_it(name, depth):
    """Draft and target draw from the same uniform of each position.

    The text is a function of the noise and the target alone.
    """
    target, drafter = TARGETS[name], DRAFTS[name]
    law = torch.cat([drafter.rows, drafter.first[None]])

    def propose(last: Tensor, uniforms: Tensor) -> Tensor:
        drafts = []
        for j in range(uniforms.shape[1]):
            last = draw(law[last], uniforms[:, j])
            drafts.append(last)
        return torch.stack(drafts, 1)

    def nothing(last: Tensor, uniforms: Tensor) -> Tensor:
        return last[:, None].expand(-1, uniforms.shape[1]) * 0

    coupled = rounds_under_shared_noise(target, propose, depth, 4)
    assert distance(law_of(coupled, 3), target.law(4)) < EXACT
    assert torch.equal(coupled, rounds_under_shared_noise(target, nothing, 1, 4))


@pytest.mark.parametrize("threshold", [0.3, 0.45])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("coupled", [False, True])
def test_chains_whose_ends_depend_on_their_drafts_and_on_earlier_rounds_do_not_bias_matching(name, threshold, coupled):
    """Chains end after an unconfident draft, and no deeper than one more than the round before accepted.

    Drafts are candidates, or see the target's noise.
    """
    target, law = TARGETS[name], torch.cat([DRAFTS[name].rows, DRAFTS[name].first[None]])
    seen: set[int] = set()

    def propose(last: Tensor, uniforms: Tensor) -> Tensor:
        drafts = []
        for j in range(uniforms.shape[1]):
            last = draw(law[last], uniforms[:, j]) if coupled else law[last].argmax(-1)
            drafts.append(last)
        return torch.stack(drafts, 1)

    def until(last: Tensor, drafts: Tensor, accepted: Tensor) -> Tensor:
        lengths = torch.minimum(
            1 + confident_until(drafts, law[torch.cat([last[:, None], drafts[:, :-1]], 1)], threshold), 1 + accepted
        )
        seen.update(lengths.tolist())
        return lengths

    texts = rounds_under_shared_noise(target, propose, 3, 4, until)
    assert len(seen) > 1, "lengths differ"
    assert distance(law_of(texts, 3), target.law(4)) < EXACT
    assert torch.equal(texts, rounds_under_shared_noise(target, propose, 3, 4)), (
        "the text itself does not depend on the lengths"
    )


def test_greedy_match_keeps_the_targets_own_tokens():
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 6]])
    wanted = torch.tensor([[4, 5, 6, 7]] * 4)
    accepted, following = match(drafts, torch.tensor([3, 3, 3, 1]), wanted)
    assert accepted.tolist() == [3, 1, 0, 1]
    assert following.tolist() == [7, 5, 4, 5]


# ------------------------------------------------------------ golden figures


def test_expected_accepted_of_the_two_symbol_example():
    """p = (1/3, 2/3), q = (2/3, 1/3), k = 2: 10/9 for token-level verification, and the law of 3 tokens is p's."""
    target, drafter = Chain.of([1 / 3, 2 / 3]), Chain.of([2 / 3, 1 / 3])
    cases = enumerate_rejection(rejection, target, drafter, 2, size=6)
    assert cases.mean_accepted() == pytest.approx(10 / 9, abs=EXACT)
    assert distance(cases.joint(target), target.law(3)) < EXACT


def test_alpha_of_the_three_symbol_example():
    """A draft is accepted with Σ min(p, q) = 7/10 for p = (.5, .3, .2), q = (.2, .3, .5).

    The most probable draft as a candidate is accepted with p(x) = 1/5.
    """
    target, drafter = Chain.of([0.5, 0.3, 0.2]), Chain.of([0.2, 0.3, 0.5])
    assert enumerate_rejection(rejection, target, drafter, 1).mean_accepted() == pytest.approx(0.7, abs=EXACT)
    uniforms = grid(2)
    candidate = drafter.first.argmax().expand(len(uniforms), 1)
    accepted, _ = match(candidate, torch.ones(len(uniforms)), draw(target.along(candidate), uniforms))
    assert float(accepted.double().mean()) == pytest.approx(0.2, abs=EXACT)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tokens_per_round_at_constant_alpha(k):
    """(1 − a^{k+1}) / (1 − a) with a = 7/10."""
    cases = enumerate_rejection(
        rejection, Chain.of([0.5, 0.3, 0.2]), Chain.of([0.2, 0.3, 0.5]), k, size=5 if k == 4 else 10
    )
    assert 1 + cases.mean_accepted() == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3, abs=EXACT)


def test_expected_accepted_of_the_first_order_chain():
    """At k = 3 the mean is 1.57773675521.

    Its thresholds share no grid: each uniform takes the midpoint of either side, weighted by its length.
    """
    f = Fraction
    target = Chain.of(
        [f(3, 8), f(3, 16), f(7, 16)],
        [[f(2, 9), f(2, 3), f(1, 9)], [f(1, 8), f(7, 16), f(7, 16)], [f(9, 17), f(7, 17), f(1, 17)]],
    )
    drafter = Chain.of(
        [f(1, 12), f(1, 6), f(3, 4)],
        [[f(9, 14), f(2, 7), f(1, 14)], [f(1, 4), f(1, 2), f(1, 4)], [f(2, 7), f(4, 7), f(1, 7)]],
    )
    drafts = paths(3, 3).repeat_interleave(8, 0)
    side = paths(2, 3).repeat(27, 1).double()  # 0: below the threshold, 1: above
    p, q = (chain.along(drafts)[:, :-1].gather(2, drafts[:, :, None])[:, :, 0] for chain in (target, drafter))
    threshold = (p / q).clamp(max=1)
    uniforms = torch.where(side == 0, threshold / 2, (1 + threshold) / 2)
    weights = drafter.weights(drafts) * torch.where(side == 0, threshold, 1 - threshold).prod(1)
    accepted, _ = rejection(
        drafts,
        torch.full((216,), 3),
        target.along(drafts),
        drafter.along(drafts)[:, :-1],
        uniforms,
        torch.full((216,), 0.5).double(),
    )
    assert float(weights.sum()) == pytest.approx(1, abs=EXACT)
    assert float((weights * accepted).sum()) == pytest.approx(1.57773675521, abs=1e-11)


# ------------------------------------------------------------ planted bugs


def mutant(residual: str = "right", shift: int = 0, bonus: str = "p", drop_below: float = 0.0) -> Rule:
    """`rejection` written down again, with places to plant a bug; without one it is checked to be the same."""

    def rule(
        drafts: Tensor, lengths: Tensor, p: Tensor, q: Tensor, accept: Tensor, correct: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted, following = [], []
        for row in range(len(drafts)):
            length = int(lengths[row])
            weak = [j for j in range(length) if q[row, j, drafts[row, j]] < drop_below]
            length = weak[0] if weak else length
            n = 0
            while n < length and accept[row, n] * q[row, n, drafts[row, n]] < p[row, n, drafts[row, n]]:
                n += 1
            law = p[row, n]
            if n < length:
                at = min(max(n + shift, 0), q.shape[1] - 1)
                law = {
                    "right": (p[row, at] - q[row, at]).clamp(min=0),
                    "abs": (p[row, n] - q[row, n]).abs(),
                    "p": p[row, n],
                }[residual]
            elif bonus == "q" and n:
                law = q[row, n - 1]
            if law.sum() == 0:
                law = p[row, n]
            accepted.append(n)
            following.append(draw(law[None], correct[row : row + 1])[0])
        return torch.tensor(accepted), torch.stack(following)

    return rule


def sharpened(chain: Chain, temperature: float) -> Chain:
    """The chain drawn at another temperature."""
    laws = torch.cat([chain.first[None], chain.rows]) ** (1 / temperature)
    laws = laws / laws.sum(-1, keepdim=True)
    return Chain(laws[0], laws[1:])


def certain(chain: Chain) -> Chain:
    """The chain's most probable token, always."""
    laws = torch.nn.functional.one_hot(torch.cat([chain.first[None], chain.rows]).argmax(-1), chain.vocab).double()
    return Chain(laws[0], laws[1:])


def test_the_mutant_without_a_bug_is_the_rule():
    target, drafter = TARGETS["three symbols"], DRAFTS["three symbols"]
    ours, again = (enumerate_rejection(rule, target, drafter, 2, size=5) for rule in (rejection, mutant()))
    assert torch.equal(ours.accepted, again.accepted)
    assert torch.equal(ours.following, again.following)


@pytest.mark.parametrize(
    ("rule", "draw_with"),
    [
        pytest.param(rejection, certain, id="argmax draft scored with full q"),
        pytest.param(mutant(shift=1), None, id="residual off by one position"),
        pytest.param(mutant(drop_below=0.3), None, id="low-q token dropped after sampling"),
        pytest.param(mutant(residual="abs"), None, id="residual = abs(p − q)"),
        pytest.param(mutant(residual="p"), None, id="residual = p"),
        pytest.param(mutant(bonus="q"), None, id="bonus drawn from q"),
        pytest.param(rejection, lambda chain: sharpened(chain, 0.8), id="draft at T = .8, ratio at T = 1"),
    ],
)
def test_the_enumeration_catches(rule, draw_with):
    target, drafter = TARGETS["three symbols"], DRAFTS["three symbols"]
    drawn = draw_with(drafter) if draw_with else drafter
    cases = enumerate_rejection(rule, target, drawn, 2, scored=drafter)
    assert distance(cases.joint(target), target.law(3)) > 0.01


def drafted_from(uniforms: Tensor, target: Chain, drafter: Chain, k: int, shared: bool) -> Cases:
    """One round whose k drafts are drawn from the first k `uniforms`; `shared`: the same k decide whether they stay."""
    law, last, drafts = torch.cat([drafter.rows, drafter.first[None]]), torch.full((len(uniforms),), 3), []
    for j in range(k):
        last = draw(law[last], uniforms[:, j])
        drafts.append(last)
    chains = torch.stack(drafts, 1)
    accept = uniforms[:, :k] if shared else uniforms[:, k : 2 * k]
    accepted, following = rejection(
        chains,
        torch.full((len(chains),), k),
        target.along(chains),
        drafter.along(chains)[:, :-1],
        accept,
        uniforms[:, -1],
    )
    return Cases(chains, accepted, following, torch.full((len(chains),), 1 / len(chains), dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 2])
def test_drawing_and_accepting_with_the_same_uniforms_is_caught(k):
    """One stream of randomness for both; with two the law is the target's."""
    target, drafter = TARGETS["three symbols"], DRAFTS["three symbols"]
    apart = drafted_from(grid(2 * k + 1), target, drafter, k, shared=False)
    assert distance(apart.joint(target), target.law(k + 1)) < EXACT
    assert distance(drafted_from(grid(k + 1), target, drafter, k, shared=True).joint(target), target.law(k + 1)) > 0.01


def test_dropping_an_unconfident_token_that_was_sampled_is_caught():
    """Dropping the second symbol gives (.85, .15) for p = (.7, .3), q = (.5, .5).

    Stopping after it instead is lossless.
    """
    target, drafter = Chain.of([0.7, 0.3]), Chain.of([0.5, 0.5])

    def dropping(drafts: Tensor, lengths: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return rejection(drafts, (drafts[:, 0] != 1).long(), *rest)

    law = enumerate_rejection(dropping, target, drafter, 1).joint(target).view(2, 2).sum(1)
    assert law.tolist() == pytest.approx([0.85, 0.15], abs=EXACT)

    def stopping_behind(drafts: Tensor, lengths: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        confident = (drafts[:, 0] != 1).long()
        return rejection(drafts, 1 + confident, *rest)

    assert distance(enumerate_rejection(stopping_behind, target, drafter, 2).joint(target), target.law(3)) < EXACT
