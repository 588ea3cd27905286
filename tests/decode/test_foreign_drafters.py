"""A drafter may be somebody else's: what it is handed is its own, and what it returns is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import (
    Abilities,
    Drafter,
    DrafterConfig,
    Fusion,
    Ngram,
    NgramConfig,
    NodeSession,
    Proposal,
    Session,
    TextSession,
)
from outrider.targets import Target

from .conftest import random_prompts

VOCAB, DEPTH = 64, 3
PROMPTS = random_prompts(5, 1, 9, 3)
PLANS = {
    "chain": Plan(DEPTH),
    "chain that ends early": Plan(DEPTH, confidence=0.1),
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2))),
    "dynamic tree": Plan(DEPTH, 3, 6),
}


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2))


class Foreign(Drafter):
    """A drafter whose session a test makes."""

    name = "foreign"

    def __init__(self, make: Callable[[], Session], abilities: Abilities, taps: tuple[int, ...] = ()):
        super().__init__(DrafterConfig())
        self.make = make
        self._abilities = abilities
        self._taps = taps

    @property
    def abilities(self) -> Abilities:
        return self._abilities

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def open(self, target, batch_size, max_length, spare=0, cache=None) -> Session:
        return self.make()


class Overwriting(NodeSession):
    """A session that knows which token follows which, and writes into everything that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def update(self, tokens, hidden, counts, path=None) -> None:
        for handed in (tokens, hidden, counts.tensor, path):
            if handed is not None:
                handed.zero_()

    def prefill(self, root: Tensor) -> Tensor:
        return self._read(root)

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        if parents is not None:
            parents.fill_(-1)
        return self._read(tokens)

    def confidence(self) -> Tensor:
        return torch.full((self.rows,), 0.7)

    def _read(self, tokens: Tensor) -> Tensor:
        self.rows, logits = len(tokens), self.table[tokens]
        tokens.fill_(7)
        return logits

    def select(self, rows: list[int]) -> None:
        rows.clear()


@pytest.mark.parametrize("kind", ["alone", "confident", "in a fusion"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=5)], ids=["greedy", "drawn"])
def test_what_a_session_writes_into_its_arguments_changes_no_text(target, name, sampling, kind):
    """Texts of one seed are the plain ones under the coupled rule, whatever is drafted."""
    plan = replace(PLANS[name], verify="coupled" if sampling.temperature else "auto")
    drafter: Drafter = Foreign(Overwriting, Abilities(reads_nodes=True, confident=kind == "confident"), taps=(1,))
    if kind == "in a fusion":
        drafter = Fusion(Ngram(NgramConfig(min_match=1)), drafter)
    plain = Decoder(target).generate(PROMPTS, 20, sampling, replace(plan, tree=None, depth=0))
    rounds = []
    for prompts in (PROMPTS, PROMPTS[:1]):
        out = Decoder(target, drafter).generate(prompts, 20, sampling, plan, stop=lambda text: text[-1] % 13 == 0)
        for text, whole in zip(out.tokens, plain.tokens, strict=False):
            assert text == whole[: len(text)]
        rounds += out.rounds
    assert sum(r.drafted for row in rounds for r in row) > 20


def test_what_a_session_writes_into_its_arguments_changes_no_drawn_texts_law(target):
    """Rejection judges the tokens by what they were drawn from: over seeds, first drafts are as often as p says."""
    drafter, counts = Foreign(Overwriting, Abilities(reads_nodes=True)), torch.zeros(2, VOCAB)
    for row, decoder in enumerate((Decoder(target), Decoder(target, drafter))):
        out = decoder.generate([[5]] * 4000, 3, Sampling(1.0, seed=row), Plan(2 * row))
        counts[row] = torch.tensor([text[2] for text in out.tokens]).bincount(minlength=VOCAB)
    expected = counts.sum(0) / 2
    kept = expected >= 5
    chi_square = float(((counts[0] - expected).square() / expected * 2)[kept].sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


class Proposing(TextSession):
    """A session that proposes what a test says."""

    def __init__(self, propose: Callable[..., Any]):
        self.says, self.round = propose, 0

    def update(self, tokens, hidden, counts, path=None) -> None:
        pass

    def propose(self, root, depth) -> Proposal:
        self.round += 1
        return self.says(root, self.round)

    def select(self, rows: list[int]) -> None:
        pass


def chain(tokens: Tensor, **changes: Any) -> Proposal:
    return replace(Proposal.chain(tokens), **changes)


def tree(root: Tensor, parents: list[int], depth: int = 2) -> Proposal:
    above = torch.tensor([parents] * len(root))
    tokens = torch.full_like(above, 3)
    return Proposal(tokens, torch.ones_like(above, dtype=torch.bool), depth, above, torch.full_like(above, -1))


def threes(root: Tensor, count: int = DEPTH) -> Tensor:
    return torch.full((len(root), count), 3)


WRONG: dict[str, tuple[Callable[[Tensor, int], Proposal], str]] = {
    "an id that is too large": (lambda root, _: chain(threes(root) * 30), "token 90; expected ids from 0"),
    "an id that is too small": (lambda root, _: chain(-threes(root)), "token -3; expected ids from 0"),
    "such an id later on": (
        lambda root, n: chain(threes(root) * (30 if n > 2 else 1)),
        "token 90; expected ids from 0",
    ),
    "too many tokens": (lambda root, _: chain(threes(root, 9)), r"9 tokens that are 9 deep; expected at most 3"),
    "too few rows": (
        lambda root, _: chain(threes(root[1:])),
        r"tokens of torch\.int64 \[3, 3\]; expected .* \[4, N\]",
    ),
    "no rows at all": (lambda root, _: replace(chain(threes(root)), tokens=root[:1]), r"tokens of torch\.int64 \[1\]"),
    "fractions": (lambda root, _: chain(threes(root).float()), r"tokens of torch\.float32 \[4, 3\]"),
    "padding of another size": (lambda root, _: chain(threes(root), real=root > 0), r"real of torch\.bool \[4\]"),
    "a chain of another depth": (lambda root, _: chain(threes(root), depth=2), "3 tokens that are 2 deep"),
    "a token after padding": (
        lambda root, _: chain(threes(root), real=torch.tensor([[True, False, True]] * len(root))),
        "tokens after padding",
    ),
    "a tree without its reading": (
        lambda root, _: replace(tree(root, [-1, 0]), read=None),
        "read of none; expected",
    ),
    "a parent after its child": (lambda root, _: tree(root, [1, -1]), r"parents \[1, -1\] in its first row"),
    "a deeper tree than said": (lambda root, _: tree(root, [-1, 0, 1]), "a tree deeper than its depth of 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proposal_is_refused_by_a_sentence(target, name):
    says, said = WRONG[name]
    drafter = Foreign(lambda: Proposing(says), Abilities(deterministic=True))
    with pytest.raises(IncompatibleError, match=rf"the drafter's Proposing proposed .*{said}.*Mend its propose"):
        Decoder(target, drafter).generate(PROMPTS, 20, plan=Plan(DEPTH))


def test_proposed_tokens_are_no_samples_whatever_the_abilities_declare(target):
    """Under a rule for drawn tokens the text is the plain sampler's: the host's tokens are judged as candidates."""
    for declared in (True, False):
        drafter = Foreign(lambda: Proposing(lambda root, _: chain(threes(root))), Abilities(deterministic=declared))
        for sampling in (Sampling(), Sampling(1.0)):
            plain, drafted = (
                Decoder(target, d).generate(PROMPTS, 20, sampling, Plan(DEPTH)).tokens for d in (None, drafter)
            )
            assert plain == drafted


@pytest.mark.parametrize("plan", [Plan(DEPTH), Plan(DEPTH, 3, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("shape", [(VOCAB - 1,), (1, VOCAB)], ids=["vocabulary", "dimensions"])
def test_logits_of_a_wrong_shape_are_refused_by_a_sentence(target, plan, shape):
    class Short(Overwriting):
        def prefill(self, root: Tensor) -> Tensor:
            return torch.zeros(len(root), *shape)

    with pytest.raises(IncompatibleError, match=r"logits of the shape \(4, .*expected \(4, .*64\)"):
        Decoder(target, Foreign(Short, Abilities(reads_nodes=True))).generate(PROMPTS, 20, plan=plan)


def test_output_ids_outside_the_vocabulary_are_refused_by_a_sentence(target):
    class Other(Overwriting):
        def __init__(self) -> None:
            super().__init__()
            self.output_ids = torch.arange(VOCAB) + VOCAB
            self.table = self.table.repeat(2, 1)

    for plan in (Plan(DEPTH), Plan(DEPTH, 3, 6)):
        with pytest.raises(IncompatibleError, match=r"tokens from 64 to 127; expected ids from 0 to 63"):
            Decoder(target, Foreign(Other, Abilities(reads_nodes=True))).generate(PROMPTS, 20, plan=plan)
