"""The engine writes what the plain reference writes, token by token and round by round, given the same drafter.

The reference makes every distribution by a pass over the whole text, and its drafter's by a session that has read the
whole text at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.reference import ReferenceDecoder
from outrider.heads import Drafter, NodeSession
from outrider.targets import Target

from ..conftest import few
from ..heads.test_drafters import SLOW  # noqa: F401 (read by conftest.py)
from .conftest import fresh_session
from .test_conformance import PROMPTS, fitting, maker
from .test_distribution import p_value

NEW = 10
TREE = Tree((-1, -1, 0, 0, 1, 2))
PLANS = {"chain": Plan(3), "static tree": Plan(tree=TREE)}
SAMPLINGS = {
    "greedy": few(),
    "sampled": few(temperature=0.8, seed=3),
    "sampled, all tokens": Sampling(1.0, seed=2**63 + 5),
}


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6))


@pytest.fixture(scope="module")
def make(target, tiny_llama) -> Callable[[str], Drafter]:
    return maker(target, tiny_llama)


def allowed(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits.index_fill(-1, torch.tensor(sampling.suppress, dtype=torch.long), float("-inf"))


def target_logits(target: Target, sampling: Sampling) -> Callable[[list[int]], Tensor]:
    return lambda text: allowed(target.model(torch.tensor([text]), use_cache=False).logits[0, -1], sampling)


def drafter_logits(target: Target, drafter: Drafter, sampling: Sampling) -> Callable[[list[int], list[int]], Tensor]:
    def logits(text: list[int], drafts: list[int]) -> Tensor:
        session = fresh_session(target, drafter, text[:-1])
        assert isinstance(session, NodeSession)
        found = session.prefill(torch.tensor(text[-1:]))
        for token in drafts:
            found = session.decode(torch.tensor([[token]]))[:, 0]
        ids = torch.arange(target.vocab_size) if session.output_ids is None else session.output_ids
        return allowed(torch.full((target.vocab_size,), float("-inf")).index_copy(0, ids, found[0].float()), sampling)

    return logits


def reference(target: Target, drafter: Drafter, plan: Plan, sampling: Sampling, sequence: int) -> ReferenceDecoder:
    """A reference decoder that is set as the engine is."""
    models = target_logits(target, sampling), drafter_logits(target, drafter, sampling)
    return ReferenceDecoder(*models, plan.depth, plan.tree, sampling.temperature, sampling.seed, sequence)


@pytest.mark.parametrize("sampling", SAMPLINGS)
# A chain of what the host proposes has no logits.
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for shape in PLANS for name in fitting("static tree")])
@torch.inference_mode()
def test_the_engine_writes_the_references_text_in_the_same_rounds(name, shape, sampling, make, target):
    """Alone and in a batch: the tokens, and how many drafts were verified and accepted in each round."""
    drafter = make(name)
    plan = PLANS[shape]
    sampling = SAMPLINGS[sampling]
    out = Decoder(target, drafter).generate(PROMPTS[:2], NEW, sampling, plan)
    for row in (0, 1):
        tokens, rounds = reference(target, drafter, plan, sampling, row).generate(PROMPTS[row], NEW)
        assert out.tokens[row] == tokens
        assert [(one.drafted, one.accepted) for one in out.rounds[row]] == rounds
    if sampling.suppress:
        assert any(one.accepted for rounds in out.rounds for one in rounds), "or little is shown"


P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])  # of the next token, by the last one
Q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0.6, 0.3, 0.1]])
WRITTEN, TEXTS = 2, 500


@pytest.mark.parametrize("tree", [None, Tree((-1, -1, 0, 0, 1)), Tree((-1, -1, 1, 0))], ids=str)
def test_the_reference_has_the_targets_law(tree):
    """Chi-square of its texts against the product of the target's probabilities."""
    law = {
        text: float(torch.stack([P[a, b] for a, b in zip((0, *text), text, strict=False)]).prod())
        for text in product(range(3), repeat=WRITTEN)
    }
    seen, accepted = Counter(), 0
    for sequence in range(TEXTS):
        decoder = ReferenceDecoder(
            lambda text: P[text[-1]].log(),
            lambda text, drafts: Q[[*text, *drafts][-1]].log(),
            depth=2,
            tree=tree,
            temperature=1.0,
            sequence=sequence,
        )
        tokens, rounds = decoder.generate([0], WRITTEN)
        seen[tuple(tokens)] += 1
        accepted += sum(count for _, count in rounds)
    assert accepted > TEXTS / 3
    assert p_value(np.array([seen[text] for text in law]), np.array(list(law.values()))) > 1e-4


def test_a_reference_that_keeps_every_draft_is_caught(target, make, monkeypatch):
    """So would be an engine that does."""
    decoder = reference(target, make("draft_model"), PLANS["chain"], SAMPLINGS["sampled"], 0)
    monkeypatch.setattr(ReferenceDecoder, "_uniform", lambda *given: torch.tensor(1e-9))
    out = Decoder(target, make("draft_model")).generate(PROMPTS[:1], NEW, SAMPLINGS["sampled"], PLANS["chain"])
    with torch.inference_mode():
        assert decoder.generate(PROMPTS[0], NEW)[0] != out.tokens[0]
