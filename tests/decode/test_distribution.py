"""End to end, through the real decoder: the joint law of four generated tokens is the target's own.

Many copies of one prompt run as one batch, each with its own sequence id. What is expected comes from the target model alone: plain
forward passes without our cache over all continuations, and the library's own logits processors. Depths 2 and 3 make
rounds end inside, at and behind the fourth token. Planted bugs show that the test can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.decode import Decoder, Plan, Sampling, engine
from outrider.decode import verify as rules
from outrider.decode.sampling import draw, probabilities
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.target import Target

VOCAB, LENGTH = 6, 4
PROMPT = [1, 4, 2, 1, 4]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SIZE = 1e-6  # of all tests of this file together (Holm's first step: the smallest p-value against SIZE / how many)


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2, hidden=16, vocab=VOCAB, seed=5, **HEADS))


@pytest.fixture(scope="module")
def drafters(tiny_llama, target) -> dict[str, Drafter]:
    torch.manual_seed(1)
    counts = torch.tensor([5, 1, 4, 0, 3, 2])
    return {
        "draft_model": DraftModel(tiny_llama(layers=1, hidden=16, vocab=VOCAB, seed=6, initializer_range=0.4, **HEADS)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(0, 1, 2)), target),
        "eagle3 pruned": Eagle3.build(Eagle3Config(taps=(0, 1, 2), draft_vocab_size=4), target, counts),
        "ngram": Ngram(),
    }


SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=.7": Sampling(0.7),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(0.7, min_p=0.15),
    "penalty": Sampling(1.0, repetition_penalty=1.4),
    "all": Sampling(0.7, top_k=5, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
}


# ------------------------------------------------------------ what is expected


def library_processors(sampling: Sampling) -> LogitsProcessorList:
    found = [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)] if sampling.repetition_penalty != 1 else []
    found.append(TemperatureLogitsWarper(sampling.temperature))
    found += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    found += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    found += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList(found)


def expected_law(target: Target, sampling: Sampling) -> np.ndarray:
    """The law of LENGTH tokens behind the prompt, `[VOCAB ** LENGTH]`."""
    steps = library_processors(sampling)
    texts, law = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        probs = steps(texts, target.model(texts, use_cache=False).logits[:, -1].float()).double().softmax(-1)
        law = (law[:, None] * probs).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return law.numpy()


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of the counts; cells expected fewer than 5 times are pooled; a count in an impossible cell is 0 at once."""
    expected = law / law.sum() * counts.sum()
    if counts[law == 0].any():
        return 0.0
    rare = expected < 5
    counts, expected = (np.append(v[~rare], v[rare].sum()) for v in (counts, expected))
    kept = expected > 0
    return float(stats.chisquare(counts[kept], expected[kept]).pvalue)


def rollouts(target: Target, drafter: Drafter | None, plan: Plan, sampling: Sampling, count: int, batch: int = 20_000) -> np.ndarray:
    """How often each text of LENGTH tokens was written, `[VOCAB ** LENGTH]`."""
    counts = np.zeros(VOCAB**LENGTH, dtype=np.int64)
    for start in range(0, count, batch):
        ids = range(start, min(start + batch, count))
        out = Decoder(target, drafter).generate([PROMPT] * len(ids), LENGTH, sampling, plan, ignore_eos=True, sequence_ids=ids)
        codes = np.array(out.tokens) @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
        counts += np.bincount(codes, minlength=VOCAB**LENGTH)
    return counts


# ------------------------------------------------------------ the rules


@dataclass(frozen=True)
class Case:
    rule: str
    drafter: str
    sampling: str
    depth: int

    def __str__(self) -> str:
        return f"{self.rule}, {self.drafter}, {self.sampling}, depth {self.depth}"


QUICK = [
    Case("rejection", "draft_model", "T=1", 3),
    Case("rejection", "draft_model", "all", 2),
    Case("rejection", "eagle3", "T=.7", 2),
    Case("rejection", "eagle3", "top_p", 3),
    Case("rejection", "eagle3 pruned", "T=1", 3),
    Case("rejection", "eagle3 pruned", "top_k", 2),
    Case("candidates", "ngram", "penalty", 2),
    Case("candidates", "draft_model", "min_p", 3),
    Case("coupled", "draft_model", "T=1", 3),
    Case("coupled", "eagle3", "all", 2),
    Case("coupled", "eagle3 pruned", "penalty", 3),
    Case("coupled", "ngram", "top_k", 2),
]
EVERY = [
    Case(rule, drafter, sampling, 2 + number % 2)
    for number, (rule, drafter, sampling) in enumerate(
        product(("rejection", "candidates", "coupled"), ("draft_model", "eagle3", "eagle3 pruned", "ngram"), SAMPLINGS)
    )
    if not (rule == "rejection" and drafter == "ngram")  # that runs as candidates
]


def measure(target: Target, drafters: dict[str, Drafter], case: Case, count: int, seed: int = 0) -> float:
    sampling = SAMPLINGS[case.sampling]
    drawn = Sampling(**{**vars(sampling), "seed": seed})
    counts = rollouts(target, drafters[case.drafter], Plan(case.depth, case.rule), drawn, count)
    return p_value(counts, expected_law(target, sampling))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_joint_law_is_the_targets(target, drafters, case):
    assert measure(target, drafters, case, 20_000) > SIZE / len(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_the_joint_law_is_the_targets_in_400000_rollouts(target, drafters, case):
    assert measure(target, drafters, case, 400_000, seed=1) > SIZE / len(EVERY)


def test_the_plain_target_draws_from_its_own_law(target):
    counts = rollouts(target, None, Plan(), SAMPLINGS["all"], 20_000)
    assert p_value(counts, expected_law(target, SAMPLINGS["all"])) > SIZE


def test_some_drafts_are_kept_and_some_refused(target, drafters):
    """Otherwise the tests above would say little."""
    for case in QUICK:
        out = Decoder(target, drafters[case.drafter]).generate([PROMPT] * 300, LENGTH, SAMPLINGS[case.sampling], Plan(case.depth, case.rule), ignore_eos=True)
        assert 0.05 < out.stats.acceptance_rate < 0.95, str(case)


# ------------------------------------------------------------ planted bugs

Rejection = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def broken_rejection(residual: str = "right", shift: int = 0, bonus: str = "p", drop_below: float = 0.0) -> Rejection:
    """The rejection rule with one thing wrong."""

    def rule(drafts: Tensor, lengths: Tensor, p: Tensor, q: Tensor, accept: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
        score = q.gather(2, drafts[:, :, None])[:, :, 0]
        lengths = (score >= drop_below).long().cumprod(1).sum(1).minimum(lengths)
        accepted, following = rules.rejection(drafts, lengths, p, q, accept, correct)
        rows, last = torch.arange(len(drafts)), q.shape[1] - 1
        refused = accepted < lengths
        near = (accepted + shift).clamp(0, last)
        wrong = {
            "right": (p[rows, near] - q[rows, near]).clamp(min=0),
            "abs": (p[rows, near] - q[rows, near]).abs(),
            "p": p[rows, accepted],
        }[residual]
        if bonus == "q":
            wrong, refused = q[rows, last], accepted > last
        wrong = torch.where(wrong.sum(-1, keepdim=True) > 0, wrong, p[rows, accepted])
        return accepted, torch.where(refused, draw(wrong, correct), following)

    return rule


def picks_the_most_probable(chooser: engine._Chooser, logits: Tensor) -> Tensor:
    probs = probabilities(logits, chooser.run.sampling)
    chooser.probs.append(probs)
    return probs.argmax(-1)


def picks_at_another_temperature(chooser: engine._Chooser, logits: Tensor) -> Tensor:
    honest = engine._Chooser.honest_pick(chooser, logits / 0.8)
    chooser.probs[-1] = probabilities(logits, chooser.run.sampling)
    return honest


BUGS = {
    "residual off by one position": ("rejection", broken_rejection(shift=1)),
    "low-q token dropped after sampling": ("rejection", broken_rejection(drop_below=0.1)),
    "residual = abs(p − q)": ("rejection", broken_rejection(residual="abs")),
    "residual = p": ("rejection", broken_rejection(residual="p")),
    "bonus drawn from q": ("rejection", broken_rejection(bonus="q")),
    "argmax draft scored with full q": ("pick", picks_the_most_probable),
    "draft at T = .8, ratio at T = 1": ("pick", picks_at_another_temperature),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(target, drafters, bug, monkeypatch):
    kind, wrong = BUGS[bug]
    if kind == "rejection":
        monkeypatch.setattr(engine, "verify", SimpleNamespace(rejection=wrong, match=rules.match, RULES=rules.RULES))
    else:
        monkeypatch.setattr(engine._Chooser, "honest_pick", engine._Chooser._pick, raising=False)
        monkeypatch.setattr(engine._Chooser, "_pick", wrong)
    assert measure(target, drafters, Case("rejection", "draft_model", "T=1", 2), 10_000) < SIZE / len(BUGS)
