"""End to end, through the real decoder: the joint law of four generated tokens is the target's own.

Many copies of one prompt run as one batch, each with its own sequence id. What is expected comes from the target model
alone: plain forward passes without our cache over all continuations, and the library's own logits processors. Depths 2
and 3 make rounds end inside, at and after the fourth token. Planted bugs show that the test can fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.decode import Decoder, Output, Plan, Sampling, Tree, rules
from outrider.decode import round as stage
from outrider.decode import sampling as drawing
from outrider.decode.rules import rejection
from outrider.decode.sampling import (
    ACCEPT,
    Context,
    Draft,
    DraftSampler,
    NextToken,
    Processors,
    draw,
    probabilities,
    uniforms,
)
from outrider.decode.trees import grow_static
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import Target

from .conftest import library_steps
from .test_rules import ChainRule

VOCAB, LENGTH = 6, 4
PROMPT = [1, 4, 2, 1, 4]
ENDS = [3, 0]  # only where min_new_tokens asks for them; a text that ended early goes on with the first of them
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
FEW = 4_000  # texts: enough to catch the bugs that are planted below
SIZE = 1e-6  # of all tests of this file together (Holm's first step: the smallest p-value against SIZE / how many)


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    # The other tokens are padding, which draft models may have more or less of.
    four_tokens = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(4)})
    return Target(tiny_llama(layers=2, hidden=16, vocab=VOCAB, seed=5, eos_token_id=ENDS, **HEADS), four_tokens)


@pytest.fixture(scope="module")
def drafters(tiny_llama, target) -> dict[str, Drafter]:
    torch.manual_seed(1)
    counts = torch.tensor([5, 1, 4, 0, 3, 2])
    return {
        "draft_model": DraftModel(tiny_llama(layers=1, hidden=16, vocab=VOCAB, seed=6, initializer_range=0.4, **HEADS)),
        "draft_model narrower": DraftModel(tiny_llama(layers=1, hidden=16, vocab=4, seed=6, **HEADS)),
        "draft_model wider": DraftModel(tiny_llama(layers=1, hidden=16, vocab=9, seed=6, **HEADS)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(0, 1, 2)), target),
        "eagle3 pruned": Eagle3.build(Eagle3Config(taps=(0, 1, 2), draft_vocab_size=4), target, counts),
        "ngram": Ngram(),
    }


WORDS = ((4, 0), (1, 4, 2), (5, 1), (2, 3, 3), (0, 5, 2))  # the first two begin in the prompt, or later

SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=.7": Sampling(0.7),
    "top_k": Sampling(1.0, top_k=3),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(0.7, min_p=0.15),
    "penalty": Sampling(0.5, repetition_penalty=3.0),
    "all": Sampling(0.7, top_k=5, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    "bad_words": Sampling(1.0, bad_words=WORDS),
    "min_new_tokens": Sampling(1.0, min_new_tokens=3),
    "processors": Sampling(0.7, top_k=4, repetition_penalty=1.2, bad_words=WORDS, min_new_tokens=2, suppress=(1,)),
}


def expected_law(target: Target, sampling: Sampling) -> np.ndarray:
    """The law of LENGTH tokens after the prompt, `[VOCAB ** LENGTH]`."""
    steps = library_steps(sampling, len(PROMPT), ENDS)
    texts, law = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(LENGTH):
        probs = steps(texts, target.model(texts, use_cache=False).logits[:, -1].float()).double().softmax(-1)
        if sampling.min_new_tokens:
            ended = torch.isin(texts[:, len(PROMPT) :], torch.tensor(ENDS)).any(1)
            probs[ended] = torch.nn.functional.one_hot(torch.tensor(ENDS[0]), VOCAB).double()
        law = (law[:, None] * probs).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return law.numpy()


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """The smaller of two p-values, doubled; a count in an impossible cell is 0 at once.

    Chi-square of the counts, where cells expected fewer than 5 times are pooled; and whether the mean surprise −log p
    of the texts is the entropy, which a law that is a little too flat or too sharp everywhere misses long before single
    cells show it.
    """
    law = law / law.sum()
    if counts[law == 0].any():
        return 0.0
    return min(1.0, 2 * min(chi_square(counts, law * counts.sum()), surprise(counts, law)))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    rare = expected < 5
    counts, expected = (np.append(v[~rare], v[rare].sum()) for v in (counts, expected))
    kept = expected > 0
    return float(stats.chisquare(counts[kept], expected[kept]).pvalue)


def surprise(counts: np.ndarray, law: np.ndarray) -> float:
    bits = -np.log(np.where(law > 0, law, 1))
    entropy = (law * bits).sum()
    deviation = np.sqrt((law * (bits - entropy) ** 2).sum() / counts.sum())
    return float(2 * stats.norm.sf(abs((counts * bits).sum() / counts.sum() - entropy) / deviation))


def generate(target: Target, drafter: Drafter | None, plan: Plan, sampling: Sampling, ids: range) -> Output:
    """One batch of texts after the prompt, with these sequence ids."""
    return Decoder(target, drafter).generate(
        [PROMPT] * len(ids), LENGTH, sampling, plan, ignore_eos=not sampling.min_new_tokens, sequence_ids=ids
    )


def rollouts(
    target: Target, drafter: Drafter | None, plan: Plan, sampling: Sampling, count: int, batch: int = 20_000
) -> np.ndarray:
    """How often each text of LENGTH tokens was written, `[VOCAB ** LENGTH]`."""
    counts = np.zeros(VOCAB**LENGTH, dtype=np.int64)
    for start in range(0, count, batch):
        out = generate(target, drafter, plan, sampling, range(start, min(start + batch, count)))
        texts = np.array([(text + ENDS[:1] * LENGTH)[:LENGTH] for text in out.tokens])
        codes = texts @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
        counts += np.bincount(codes, minlength=VOCAB**LENGTH)
    return counts


@dataclass(frozen=True)
class Case:
    rule: str
    drafter: str
    sampling: str
    depth: int
    shape: str = "chain"

    @property
    def plan(self) -> Plan:
        if self.shape == "static":
            return Plan(tree=TREES[self.depth], verify=self.rule)
        if self.shape == "dynamic":
            return Plan(self.depth, 2, 2 * self.depth - 1, verify=self.rule)
        return Plan(self.depth, verify=self.rule, confidence=0.25 if self.shape == "confident" else 0.0)

    def __str__(self) -> str:
        shape = {"chain": "", "confident": ", ends where unsure"}.get(self.shape, f", {self.shape} tree")
        return f"{self.rule}, {self.drafter}, {self.sampling}, depth {self.depth}{shape}"


TREES = {2: Tree((-1, -1, 0, 0, 1)), 3: Tree((-1, -1, -1, 0, 0, 1, 3, 3, 5))}


QUICK = [
    Case("rejection", "draft_model", "T=1", 3),
    Case("rejection", "draft_model", "all", 2),
    Case("rejection", "draft_model narrower", "T=1", 3),
    Case("rejection", "draft_model wider", "T=1", 3),
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
    Case("rejection", "draft_model", "bad_words", 3),
    Case("rejection", "eagle3 pruned", "min_new_tokens", 2),
    Case("candidates", "draft_model", "processors", 3),
    Case("coupled", "eagle3", "processors", 2),
    Case("block", "draft_model", "T=1", 3),
    Case("block", "eagle3 pruned", "processors", 2),
    Case("without_replacement", "draft_model", "T=1", 2, "static"),
    Case("without_replacement", "draft_model narrower", "processors", 2, "static"),
    Case("without_replacement", "draft_model wider", "T=1", 2, "static"),
    Case("without_replacement", "eagle3", "processors", 3, "static"),
    Case("without_replacement", "eagle3 pruned", "T=.7", 2, "static"),
    Case("traversal", "draft_model", "all", 3, "static"),
    Case("traversal", "eagle3 pruned", "penalty", 2, "static"),
    Case("candidates", "eagle3", "T=1", 3, "static"),
    Case("candidates", "draft_model", "processors", 3, "dynamic"),
    Case("candidates", "eagle3 pruned", "T=1", 2, "dynamic"),
    Case("coupled", "eagle3", "top_p", 3, "static"),
    Case("coupled", "draft_model", "bad_words", 3, "dynamic"),
    Case("rejection", "draft_model", "T=1", 3, "confident"),
    Case("block", "draft_model", "T=.7", 3, "confident"),
    Case("candidates", "draft_model", "T=1", 3, "confident"),
    Case("coupled", "draft_model", "processors", 3, "confident"),
]
IN_CHAINS = [(rule, "chain") for rule in ("rejection", "candidates", "coupled")]
IN_SHORT_ONES = [(rule, "confident") for rule in ("rejection", "block", "candidates", "coupled")]
OTHERWISE = [("block", "chain"), ("without_replacement", "static"), ("traversal", "static")]
OTHERWISE += [("candidates", "dynamic"), ("coupled", "static")]
TWO = ("draft_model", "eagle3 pruned")
EVERY = [
    Case(rule, drafter, sampling, 3 if shape == "confident" else 2 + number % 2, shape)
    for cases in (
        product(IN_CHAINS, ("draft_model", "eagle3", "eagle3 pruned", "ngram"), SAMPLINGS),
        product(OTHERWISE, TWO, ("T=1", "top_k", "top_p", "min_p", "penalty", "processors")),
        product(IN_SHORT_ONES, TWO, ("T=1", "processors")),
    )
    for number, ((rule, shape), drafter, sampling) in enumerate(cases)
    if (rule, drafter) != ("rejection", "ngram")  # that runs as candidates
]


def measure(target: Target, drafters: dict[str, Drafter], case: Case, count: int, seed: int = 0) -> float:
    sampling = SAMPLINGS[case.sampling]
    counts = rollouts(target, drafters[case.drafter], case.plan, replace(sampling, seed=seed), count)
    return p_value(counts, expected_law(target, sampling))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_joint_law_is_the_targets(target, drafters, case):
    assert measure(target, drafters, case, 20_000) > SIZE / len(QUICK)


def holm(p_values: dict[str, float], tests: int) -> dict[str, float]:
    """Return p-values adjusted for `tests` tests (Holm, 1979).

    Those below a size are refuted, with at most that chance of one error among them.
    """
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (tests - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def test_holms_adjustment_by_hand():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.015, "d": 0.5}, 4)
    assert adjusted == pytest.approx({"a": 0.04, "c": 0.045, "b": 0.08, "d": 0.5})


LEDGER = Path(__file__).parents[2] / "build" / "p-values.json"


def note(name: str, p: float) -> None:
    """Write a case's p-value to build/p-values.json, beside those of earlier runs.

    The whole takes hours, and may be done in parts.
    """
    known = json.loads(LEDGER.read_text())["cases"] if LEDGER.exists() else {}
    found = {n: row["p"] for n, row in known.items()} | {name: p}
    adjusted = holm(found, len(EVERY))
    LEDGER.parent.mkdir(exist_ok=True)
    cases = {n: {"p": p, "holm": adjusted[n]} for n, p in found.items()}
    LEDGER.write_text(json.dumps({"size": SIZE, "tests": len(EVERY), "cases": cases}, indent=2) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_the_joint_law_is_the_targets_in_400000_rollouts(target, drafters, case):
    found = measure(target, drafters, case, 400_000, seed=1 + EVERY.index(case))
    note(str(case), found)
    assert found > SIZE / len(EVERY)


def test_the_plain_target_draws_from_its_own_law(target):
    counts = rollouts(target, None, Plan(), SAMPLINGS["all"], FEW)
    assert p_value(counts, expected_law(target, SAMPLINGS["all"])) > SIZE


def test_some_drafts_are_kept_and_some_refused(target, drafters):
    """Otherwise the tests above would say little."""
    for case in QUICK:
        out = generate(target, drafters[case.drafter], case.plan, SAMPLINGS[case.sampling], range(300))
        assert 0.05 < out.stats.acceptance_rate < 0.95, str(case)
        assert case.shape != "confident" or len({r.drafted for rounds in out.rounds for r in rounds}) > 1, str(case)


Plant = Callable[[pytest.MonkeyPatch], None]


def broken_rejection(residual: str = "right", shift: int = 0, bonus: str = "p", drop_below: float = 0.0) -> ChainRule:
    """The rejection rule with one thing wrong: what follows a refusal or all drafts is drawn here once more."""

    def rule(drafts, lengths, p, q, accept, correct):
        score = q.gather(2, drafts[:, :, None])[:, :, 0]
        lengths = (score >= drop_below).long().cumprod(1).sum(1).minimum(lengths)
        accepted, following = rejection(drafts, lengths, p, q, accept, correct)
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


def picks_the_most_probable(sampler: DraftSampler, logits: Tensor, depth: int) -> NextToken:
    probs = probabilities(logits, sampler.config.sampling)
    return NextToken(probs.argmax(-1), probs, None, logits, probs.argmax(-1))


def picks_at_another_temperature(sampler: DraftSampler, logits: Tensor, depth: int) -> NextToken:
    honest = DraftSampler.honest_pick(sampler, logits / 0.8, depth)
    return honest._replace(probs=probabilities(logits, sampler.config.sampling))


def with_rule(wrong: ChainRule) -> Plant:
    return lambda patch: patch.setattr(rules, "rejection", wrong)


def with_pick(wrong: Callable[[DraftSampler, Tensor, int], NextToken]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(DraftSampler, "honest_pick", DraftSampler._pick, raising=False)
        patch.setattr(DraftSampler, "_pick", wrong)

    return plant


def the_target_is_not_filtered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rules, "probabilities", lambda logits, sampling: probabilities(logits, Sampling(sampling.temperature))
    )


def drafts_are_accepted_with_the_uniforms_that_drew_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drawing, "DRAFT", ACCEPT)


def every_round_has_the_same_uniforms(patch: pytest.MonkeyPatch) -> None:
    def stuck(seed: int, stream: int, *keys: Tensor) -> Tensor:
        return uniforms(seed, stream, keys[0], *(key - key.flatten()[0] for key in keys[1:]))

    for module in (rules, drawing):
        patch.setattr(module, "uniforms", stuck)


def unconfident_drafts_are_left_out(patch: pytest.MonkeyPatch) -> None:
    honest = stage._masked
    patch.setattr(stage, "_masked", lambda setup, state, draft, lengths: honest(setup, state, draft, lengths - 1))


def a_tree_is_scored_with_the_law_of_another_place(patch: pytest.MonkeyPatch) -> None:
    def grow(*arguments: Any) -> Draft:
        draft = grow_static(*arguments)
        assert draft.probs is not None
        return replace(draft, probs=draft.probs[:, [0, 2, 1, *range(3, draft.probs.shape[1])]])

    patch.setattr(stage, "grow_static", grow)


PLAIN = Case("rejection", "draft_model", "T=1", 2)
CONFIDENT = Case("rejection", "draft_model", "T=1", 3, "confident")
TREE = Case("without_replacement", "draft_model", "T=.7", 2, "static")
BUGS: dict[str, tuple[Plant, Case]] = {
    "residual off by one position": (with_rule(broken_rejection(shift=1)), PLAIN),
    "low-q token dropped after sampling": (with_rule(broken_rejection(drop_below=0.1)), PLAIN),
    "residual = abs(p − q)": (with_rule(broken_rejection(residual="abs")), PLAIN),
    "residual = p": (with_rule(broken_rejection(residual="p")), PLAIN),
    "bonus drawn from q": (with_rule(broken_rejection(bonus="q")), PLAIN),
    "argmax draft scored with full q": (with_pick(picks_the_most_probable), PLAIN),
    "draft at T = .8, ratio at T = 1": (with_pick(picks_at_another_temperature), PLAIN),
    "the target is not filtered": (the_target_is_not_filtered, replace(PLAIN, sampling="top_k")),
    "draft and accept share one stream": (drafts_are_accepted_with_the_uniforms_that_drew_them, PLAIN),
    "every round has the same uniforms": (every_round_has_the_same_uniforms, PLAIN),
    "unconfident drafts are left out": (unconfident_drafts_are_left_out, CONFIDENT),
    "unconfident drafts are left out of a block": (unconfident_drafts_are_left_out, replace(CONFIDENT, rule="block")),
    "q of another place in a tree": (a_tree_is_scored_with_the_law_of_another_place, TREE),
    "q of another place in a tree, traversed": (
        a_tree_is_scored_with_the_law_of_another_place,
        replace(TREE, rule="traversal"),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(target, drafters, bug, monkeypatch):
    plant, case = BUGS[bug]
    plant(monkeypatch)
    assert measure(target, drafters, case, 3 * FEW if "T = .8" in bug else FEW) < SIZE / len(BUGS)


@pytest.mark.parametrize("off", [pytest.param(1.0, marks=pytest.mark.slow), 1.02])
def test_a_target_temperature_that_is_off_by_2_percent_is_caught(tiny_llama, drafters, off, monkeypatch):
    """With a target that is surer of its tokens, the mean surprise of 25,000 texts shows it.

    Single cells would need ten times as many.
    """
    sure = Target(tiny_llama(layers=2, hidden=16, vocab=VOCAB, seed=5, initializer_range=0.4, **HEADS))
    monkeypatch.setattr(
        rules,
        "probabilities",
        lambda logits, sampling: probabilities(logits, replace(sampling, temperature=off * sampling.temperature)),
    )
    found = measure(sure, drafters, replace(PLAIN, sampling="T=.7"), 25_000)
    assert found < SIZE if off != 1 else found > SIZE


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("sampling", ["penalty", "bad_words", "min_new_tokens"])
def test_processors_that_look_at_the_root_only_are_caught(target, drafters, sampling, shape, monkeypatch):
    """A draft must count as text for what follows it in its own round."""
    honest = Processors.__call__

    def blind(processors: Processors, logits: Tensor, context: Context) -> Tensor:
        def root(values: Tensor) -> Tensor:
            return values[:, :1].expand_as(values)

        present = None if context.present is None else root(context.present)
        return honest(processors, logits, Context(root(context.num_new), root(context.recent), present))

    monkeypatch.setattr(Processors, "__call__", blind)
    rule = {"chain": "rejection", "static": "without_replacement", "dynamic": "candidates"}[shape]
    assert measure(target, drafters, Case(rule, "draft_model", sampling, 3, shape), FEW) < SIZE / 9
