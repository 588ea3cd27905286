"""Every drafter of the registry, through the real decoder: the text is the target's, and what is promised is kept.

It is so under every rule that can judge a drafter's proposals, in every shape it can draft, alone and in a batch.

The rules themselves are enumerated in `test_rules.py`; `test_distribution.py` looks at some drafters harder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.decode import Decoder, Plan, Sampling, Tree, static_batch
from outrider.decode import round as stage
from outrider.decode.engine import Run
from outrider.decode.rule_table import RULES as RULE_TABLE
from outrider.decode.sampling import probabilities
from outrider.heads import HEADS, Drafter, NodeSession, TargetBatch
from outrider.heads.session import Abilities
from outrider.targets import Target

from ..conftest import ALL_TOKENS, FEW_TOKENS, best_of_few, few, make_llama
from ..heads.conftest import chained
from ..heads.test_drafters import MAKERS, SLOW, WITH_WEIGHTS  # noqa: F401 (SLOW is read by conftest.py)
from .conftest import fresh_session, random_prompts
from .test_distribution import p_value

PROMPTS = random_prompts(5, 1, 9, 3, 12, 2, 7, 4)
SHAPES = {"chain": Plan(3), "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2))), "dynamic tree": Plan(3, 3, 6)}
NEW = 14

# Which rules can judge samples in which shape, beside greedy and coupled.
RULES = [
    ("chain", "rejection"),
    ("chain", "block"),
    ("static tree", "without_replacement"),
    ("static tree", "traversal"),
    ("dynamic tree", "candidates"),
]
WRITTEN, ROLLOUTS = 4, 2_000  # tokens of three kinds, 81 texts; rounds end before, at and after the last one
SHALLOW = {"chain": Plan(2), "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1))), "dynamic tree": Plan(2, 3, 5)}
SIZE = 1e-6  # of all tests of a rule and a drafter together


@cache
def abilities() -> dict[str, Abilities]:
    """What each drafter of the table declares that it can do."""
    target = Target(make_llama(layers=6))
    return {name: make(target, make_llama).abilities for name, make in MAKERS.items()}


def fitting(shape: str) -> list[str]:
    """Drafters of the table that draft in this shape: trees grow from the logits of those that read nodes."""
    return [name for name in MAKERS if shape == "chain" or abilities()[name].reads_nodes]


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=6))


@cache
def alone(target: Target, sampling: Sampling, plan: Plan) -> list[list[int]]:
    """What the target writes after the prompts without a drafter."""
    return Decoder(target).generate(PROMPTS, NEW, sampling, plan).tokens


@pytest.fixture(scope="module")
def make(target, tiny_llama) -> Callable[[str], Drafter]:
    return maker(target, tiny_llama)


@pytest.fixture(scope="module")
def narrow(tiny_llama) -> tuple[Target, Callable[[str], Drafter]]:
    """A target whose passes over thousands of rows are quick, and what makes drafters for it."""
    llama = partial(tiny_llama, hidden=16, num_attention_heads=2, num_key_value_heads=1)
    target = Target(llama(layers=6))
    return target, maker(target, llama)


def maker(target: Target, llama: Callable[..., LlamaForCausalLM]) -> Callable[[str], Drafter]:
    def make(name: str) -> Drafter:
        torch.manual_seed(3)
        return MAKERS[name](target, llama)

    return cache(make)


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for shape in SHAPES for name in fitting(shape)])
def test_text_is_the_targets_alone_and_in_ragged_batches(name, shape, make, target):
    """Token for token: greedily, and above temperature 0 under the rules that match tokens."""
    drafter, plan = make(name), SHAPES[shape]
    decoder = Decoder(target, drafter)
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    cases = [(Sampling(), "auto"), (few(), "auto"), (Sampling(**drawn), "coupled"), (few(**drawn), "coupled")]
    for sampling, verify in (*cases, (few(**drawn, repetition_penalty=1.3), "candidates")):
        plan = replace(plan, verify=verify)
        expected = alone(target, sampling, Plan(0, verify=verify))
        together = decoder.generate(PROMPTS, NEW, sampling, plan)
        assert together.tokens == expected
        assert together.rule == ("greedy" if verify == "auto" else verify)
        for row in (0, 4):
            single = decoder.generate([PROMPTS[row]], NEW, sampling, plan, sequence_ids=[row])
            assert single.tokens == [expected[row]]
        if sampling.suppress:
            assert together.stats.tau > 1.05, "or nothing would be seen of what follows an accepted draft"


@pytest.mark.parametrize("sampling", [few(min_new_tokens=3), few(min_new_tokens=3, temperature=0.9, seed=3)], ids=str)
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for shape in SHAPES for name in fitting(shape)])
def test_rounds_of_fixed_shapes_are_the_usual_ones(name, shape, sampling, make, target, monkeypatch):
    """Also ahead of what the last one said, and its state moved in memory, as on a GPU; rows finish unevenly."""

    def moved(setup: stage.RoundSetup, state: stage.RoundState, **how: Any) -> Any:
        return stage.step(setup, state.rebound([tensor.clone() for tensor in state.tensors()]), **how)

    monkeypatch.setattr(static_batch, "step", moved)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", FEW_TOKENS[0])
    usual, fixed, ahead = (Decoder(target, make(name), static=static) for static in (False, True, True))
    ahead.static_batches.ahead = True
    asked = (PROMPTS[:4], 24, sampling, SHAPES[shape])
    expected = usual.generate(*asked)
    assert len(set(map(len, expected.tokens))) > 1
    assert expected.stats.tau > 1.05
    if sampling.greedy:
        assert expected.tokens == Decoder(target).generate(*asked[:3], Plan(0)).tokens
    for decoder in (fixed, ahead):
        found = decoder.generate(*asked)
        assert found.tokens == expected.tokens
        assert found.rounds == expected.rounds


@pytest.mark.parametrize(("name", "shape", "rule"), [(name, *how) for how in RULES for name in fitting(how[0])])
def test_text_has_the_targets_law_under_sampling_rules(name, shape, rule, narrow):
    """Chi-square of the texts; proposals that are no samples are judged as candidates."""
    target, make = narrow
    drafter, plan = make(name), replace(SHALLOW[shape], verify=rule)
    prompts = [PROMPTS[0]] * ROLLOUTS
    out = Decoder(target, drafter).generate(prompts, WRITTEN, few(temperature=1.0), plan, ignore_eos=True)
    assert out.rule == ("candidates" if drafter.abilities.deterministic and RULE_TABLE[rule].samples else rule)
    if not drafter.abilities.deterministic:
        rounds = [one for row in out.rounds for one in row]
        assert sum(one.accepted for one in rounds) > 0.3 * len(rounds), "or the test would see little of the rule"
    law = expected_law(target)
    seen = Counter(map(tuple, out.tokens))
    assert seen.keys() <= law.keys()
    counts = np.array([seen[text] for text in law])
    assert p_value(counts, np.array(list(law.values()))) > SIZE / (len(MAKERS) * len(RULES))


# Where rows end, so that they leave at different times.
STOPS: dict[tuple[int, ...], Callable[[list[int]], bool]] = {
    ALL_TOKENS: lambda text: len(text) == 32 - 8 * (text[0] % 4),
    FEW_TOKENS: lambda text: text.count(text[0]) == 12,
}


@pytest.mark.parametrize("name", [name for name in fitting("chain") if name not in ("lookahead", "suffix tree")])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("tokens", STOPS, ids=["all tokens", "few tokens"])
def test_a_round_proposes_what_a_drafter_that_read_the_text_at_once_would(
    name, static, tokens, make, target, monkeypatch
):
    """The state is a function of the text, after rounds of any depths, plain ones between them, and rows that left.

    (Lookahead remembers more.) Of all tokens a wrong one in the state shows; of few, drafts are kept.
    """
    drafter = make(name)
    draft = stage.draft
    generator = torch.Generator().manual_seed(4)
    rounds = []
    if static and drafter.abilities.from_text:
        pytest.skip("the host proposes, by the same session; test_static.py holds its rounds to these")

    runs = []  # the one that is under way
    start = Run.steps

    def steps(run):
        runs.append(run)
        return start(run)

    def checked(setup, state, depth, *more):
        found, run = draft(setup, state, depth, *more), runs[-1]
        proposal = found.proposal
        for row, i in enumerate(run.active if depth else ()):
            if run.sequences[i].done:
                continue
            rounds.append(depth)
            *text, root = run.request.prompts[i] + run.sequences[i].tokens
            fresh, count = fresh_proposal(target, drafter, text, root, depth, tokens), int(proposal.lengths[row])
            # Alone, a fusion does without its model where something was found.
            count = min(count, len(fresh)) if name.startswith("fusion") else count
            assert proposal.tokens[row].tolist()[:count] == fresh[:count]
        return replace(found, probs=None)

    monkeypatch.setattr(Run, "steps", steps)
    monkeypatch.setattr(stage, "draft", checked)
    monkeypatch.setattr(Run, "_depth", lambda run, state: (state, int(torch.randint(0, 5, (), generator=generator))))
    out = Decoder(target, drafter, static).generate(PROMPTS[:4], 32, few(tokens), Plan(4), stop=STOPS[tokens])
    assert len({len(text) for text in out.tokens}) > 1, "rows leave at different times"
    assert set(rounds) == {1, 2, 3, 4}
    assert out.stats.tau > 1.05 or tokens == ALL_TOKENS


def fresh_proposal(
    target: Target, drafter: Drafter, text: list[int], root: int, depth: int, kept: Sequence[int]
) -> list[int]:
    session = fresh_session(target, drafter, text)
    found = [] if session.text is None else session.text.propose(torch.tensor([root]), depth).tokens[0].tolist()
    if found or not isinstance(session, NodeSession):
        return found
    depth = min(depth, drafter.max_depth or depth)
    choose = partial(best_of_few, token_ids=session.output_ids, tokens=kept)
    return chained(session, [root], depth, choose).tokens[0].tolist()


@cache
def expected_law(target: Target) -> dict[tuple[int, ...], float]:
    """Probability of every text of WRITTEN tokens of FEW_TOKENS."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(WRITTEN):
        texts = torch.tensor([[*PROMPTS[0], *text] for text in law])
        probs = target.model(texts, use_cache=False).logits[:, -1, list(FEW_TOKENS)].double().softmax(-1)
        law = {
            (*text, token): before * float(p)
            for (text, before), row in zip(law.items(), probs, strict=True)
            for token, p in zip(FEW_TOKENS, row, strict=True)
        }
    return law


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for shape in ("chain", "dynamic tree") for name in fitting(shape)]
)
def test_a_requests_caches_end_with_it(name, shape, make, target, caches):
    """At once: Python's search for cycles comes late, and until then they would stand beside the next request's."""
    Decoder(target, make(name)).generate(PROMPTS[:2], 4, Sampling(0.0), SHAPES[shape])
    assert caches
    assert all(cache() is None for cache in caches)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
@torch.no_grad()
def test_what_training_promises_decoding_keeps(name, make, target):
    """Of rounds of one draft at temperature 1 as many are accepted as the training loss's analytic alpha says."""
    drafter, start = make(name), len(PROMPTS[0])
    out = Decoder(target, drafter).generate([PROMPTS[0]] * 24, 60, Sampling(1.0, seed=5), Plan(1), ignore_eos=True)
    tokens = torch.tensor([PROMPTS[0] + text for text in out.tokens])
    drafted = torch.zeros_like(tokens, dtype=torch.bool)  # where a round drafted its token
    accepted = 0
    for row, rounds in enumerate(out.rounds):
        place = start + 1
        for one in rounds:
            if place < tokens.shape[1]:
                drafted[row, place], accepted = True, accepted + one.accepted
            place += one.emitted
    seen = target.forward(tokens, taps=drafter.taps)
    batch = TargetBatch(target, tokens, drafted, seen.hidden, seen.last)
    promised, count = map(float, drafter.eval().loss(batch).metrics["alpha_d1"])
    assert count == int(drafted.sum()) > 500
    mean = promised / count
    # The alphas of single places differ, which makes the true deviation smaller than this.
    assert abs(accepted - promised) <= 4 * (count * mean * (1 - mean)) ** 0.5, (
        f"{accepted / count:.3f} of the drafts were accepted, {mean:.3f} were promised"
    )


@pytest.mark.parametrize("name", [name for name in MAKERS if not HEADS[name.split()[0]].trainable])
def test_what_is_found_is_accepted_as_often_as_p_says(name, make, target, monkeypatch):
    """At temperature 1 as many drafts are accepted as their distributions promise, at each depth that a round reached.

    A found token x promises p(x), siblings the sum of theirs, and what a cascade's model drew Σ min(p, q). It holds in
    sum, and weighted by what was promised.
    """
    promised = []
    kept = []
    sampling = Sampling(1.0, seed=5)
    honest = stage.judge

    def watched(setup, state, draft, logits, keys):
        verdict, best = honest(setup, state, draft, logits, keys)
        proposal = draft.proposal
        draft_probs = draft.probs
        accepted = verdict.accepted
        p = probabilities(logits, sampling)
        if proposal.parents is not None:  # the first level of a tree
            drafts = proposal.real & (proposal.parents == -1)
            levels = [(drafts.any(1), (p[:, 0].gather(1, proposal.tokens) * drafts).sum(1))]
        else:
            shares = p[:, :-1].gather(2, proposal.tokens[:, :, None])[:, :, 0]
            if draft_probs is not None:
                shares = torch.minimum(p[:, :-1], draft_probs).sum(2)
            levels = list(zip(proposal.real.unbind(1), shares.unbind(1), strict=True))
        for d, (real, share) in enumerate(levels):
            there = real & (accepted >= d)
            promised.extend(share[there].tolist())
            kept.extend((accepted > d)[there].tolist())
        return verdict, best

    monkeypatch.setattr(stage, "judge", watched)
    out = Decoder(target, make(name)).generate([PROMPTS[0]] * 64, 80, sampling, Plan(3), ignore_eos=True)
    assert out.rule == ("candidates" if make(name).abilities.deterministic else "rejection")
    shares = np.array(promised)
    assert len(shares) > 2000
    for weights in (np.ones_like(shares), shares):
        deviation = (weights**2 * shares * (1 - shares)).sum() ** 0.5
        difference = (weights * (np.array(kept) - shares)).sum()
        assert abs(difference) < 4 * deviation, (
            f"{np.mean(kept):.3f} were accepted, {shares.mean():.3f} were promised "
            f"({difference / deviation:.1f} deviations)"
        )
