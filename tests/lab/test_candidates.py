"""A head among candidates: their logits are the head's own, no other token is drafted, and the text is the target's."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode.sampling import probabilities
from outrider.formats.engines import layout_of
from outrider.heads import Eagle1, Eagle3, PEagle, load_drafter
from outrider.lab.candidates import CandidateHead, fit, recall, states_of
from outrider.targets import Target

from ..closeness import assert_same, precisions
from ..decode.test_distribution import p_value
from ..decode.test_rules import EXACT, SAMPLED, SHAPES, Trees, bias, random_source
from ..heads.conftest import made

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [30, 31]]
PLANS = {"chain": Plan(3), "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1))), "dynamic tree": Plan(3, 3, 6)}


def heads(target: Target) -> dict[str, Any]:
    return {
        "eagle1": made(Eagle1, target),
        "eagle1 pruned": made(Eagle1, target, draft_vocab_size=20),
        "eagle3": made(Eagle3, target, norm_taps=True, norm_output=True),
        "eagle3 pruned": made(Eagle3, target, draft_vocab_size=20),
    }


def over(head: Any, rank: int, num_candidates: int) -> CandidateHead:
    torch.manual_seed(0)
    return CandidateHead.over(head, rank, num_candidates).requires_grad_(False)


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["eagle1", "eagle1 pruned", "eagle3", "eagle3 pruned"])
@precisions(torch.float64)
def test_candidates_have_the_heads_own_logits_and_others_none(kind, tiny_llama):
    """They are the tokens that the factors score highest; a target may scale and cap its logits."""
    model = tiny_llama()
    model.config.final_logit_softcapping, model.config.logit_scale = 2.0, 0.7
    target = Target(model)
    head = heads(target)[kind]
    among = over(head, 5, 7)
    states = drawn((2, 3, 32))
    whole, found = head.embed_output(states, target), among.output_of(target)(states)
    kept = found > -torch.inf
    assert (kept.sum(-1) == 7).all()
    assert_same(found[kept], whole[kept])
    by_factors = states @ among.down.weight.T @ among.scores.weight.T
    assert (
        by_factors.masked_fill(~kept, torch.inf).amin(-1) >= by_factors.masked_fill(kept, -torch.inf).amax(-1)
    ).all()


@precisions(torch.float64)
def test_the_closed_form_is_the_best_of_its_rank(target):
    """By the singular vectors of the whole weighted matrix; of the full rank the factors are the embedding itself."""
    head = heads(target)["eagle3"]
    states = drawn((400, 32)) @ torch.diag(torch.linspace(0.1, 3, 32)) + 0.5
    shares = (head.lm_head(states).softmax(-1).mean(0) + 1 / 64) / 2
    rows = head.lm_head.weight - shares @ head.lm_head.weight
    spread = torch.linalg.cholesky(states.T @ states / 400)  # another root of the covariance
    weighted = shares.sqrt()[:, None] * (rows @ spread)
    left, sizes, right = torch.linalg.svd(weighted, full_matrices=False)
    for rank in (4, 32):
        among = over(head, rank, 8)
        fit(among, target, states)
        down, scores = among.down.weight, among.scores.weight
        best = left[:, :rank] * sizes[:rank] @ right[:rank]
        assert_same(shares.sqrt()[:, None] * (scores @ down @ spread), best)
    assert_same(scores @ down, rows)


def test_of_full_rank_the_head_drafts_as_alone_at_temperature_0(target):
    """Then the most probable token is always a candidate, if there is only one."""
    for head in heads(target).values():
        among = over(head, 32, 1)
        fit(among, target, states_of(head, target, PROMPTS, 30, Plan(3)))
        alone, found = (Decoder(target, d).generate(PROMPTS, 30, plan=Plan(3), ignore_eos=True) for d in (head, among))
        assert found.tokens == alone.tokens
        assert found.rounds == alone.rounds


def test_states_are_those_of_the_heads_own_drafts(target):
    """One of each draft, and nothing of the head or its rounds is changed by looking."""
    head = heads(target)["eagle3 pruned"]
    alone = Decoder(target, head).generate(PROMPTS[:1], 20, plan=Plan(3))
    states = states_of(head, target, PROMPTS[:1], 20, Plan(3))
    drafted = sum(one.drafted for one in alone.rounds[0])
    assert states.shape == (drafted, 32)
    assert not states.is_inference()


def test_recall_is_counted(target):
    """Against a loop over the states, one by one."""
    head = heads(target)["eagle1 pruned"]
    among = over(head, 3, 5)
    states = drawn((300, 32))
    hits, mass = 0, 0.0
    for state in states:
        candidates = (among.scores.weight @ among.down.weight @ state).topk(5).indices.tolist()
        probs = target.lm_head(state[None], head.token_ids)[0].softmax(-1)
        hits += int(probs.argmax()) in candidates
        mass += float(probs[candidates].sum())
    assert recall(among, target, states) == (pytest.approx(hits / 300), pytest.approx(mass / 300, abs=1e-5))


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@precisions(torch.float64)
def test_the_law_is_the_targets_whatever_the_candidates(tiny_llama, num_candidates, temperature):
    """Enumerated in float64, by all rules, with what is drafted at six places among five tokens."""
    head = made(Eagle3, Target(tiny_llama(vocab=5)))
    logits = over(head, 3, num_candidates).output_of(Target(tiny_llama(vocab=5)))(drawn((6, 32)))
    laws = probabilities(logits, Sampling(temperature))
    assert (laws.count_nonzero(1) == num_candidates).all()
    target = random_source(5, num_candidates)
    for name, rule in SAMPLED.items():
        for shape in ("chain of 1", "chain of 2") + (() if name in ("rejection", "block") else ("2 siblings",)):
            assert bias(rule, Trees.drawn(SHAPES[shape], target, laws), target) < EXACT, (name, shape)


RULES = [("chain", "rejection"), ("chain", "block"), ("static tree", "without_replacement")]
RULES += [("static tree", "traversal"), ("dynamic tree", "candidates")]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize(("shape", "rule"), RULES)
def test_texts_have_the_targets_law(kind, shape, rule, tiny_llama):
    """Chi-square of texts of three of five tokens, of which two are candidates: trees ask for a third."""
    target = Target(tiny_llama(vocab=5, layers=4, hidden=16, num_attention_heads=2, num_key_value_heads=1))
    among = over(made({"eagle1": Eagle1, "eagle3": Eagle3}[kind], target), 4, 2)
    plan = Plan(PLANS[shape].depth, PLANS[shape].width, PLANS[shape].nodes, PLANS[shape].tree, verify=rule)
    out = Decoder(target, among).generate([[1, 2, 3]] * 4000, 3, Sampling(1.0), plan, ignore_eos=True)
    assert out.rule == rule
    assert out.stats.tau > 1.1
    law = {}
    for text in product(range(5), repeat=3):
        logits = target.model(torch.tensor([[1, 2, 3, *text]]), use_cache=False).logits[0, 2:-1].double()
        law[text] = float(logits.softmax(-1).gather(1, torch.tensor(text)[:, None]).prod())
    seen = Counter(map(tuple, out.tokens))
    assert p_value(np.array([seen[text] for text in law]), np.array(list(law.values()))) > 1e-6 / 10


def test_a_saved_one_is_checked_at_the_door(target, tiny_llama, tmp_path):
    head = heads(target)["eagle3 pruned"]
    among = over(head, 4, 6)
    among.save(tmp_path)
    assert load_drafter(tmp_path, target).digest() == among.digest()
    with pytest.raises(IncompatibleError, match="was made for a hidden size of 32, the target's is 48"):
        load_drafter(tmp_path, Target(tiny_llama(hidden=48)))
    config = (tmp_path / "config.json").read_text()
    for old, new, said in (
        ('"rank": 4', '"rank": 33', "candidates: rank 33 exceeds the head's 32"),
        ('"num_candidates": 6', '"num_candidates": 21', "candidates: num_candidates 21 exceeds the head's 20"),
        ('"type": "eagle3"', '"type": "medusa"', "candidates.head: unknown"),
    ):
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(BadInputError, match=said):
            load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(config.replace('"rank": 4', '"rank": 5'))
    with pytest.raises(IncompatibleError, match="does not fit its config"):
        load_drafter(tmp_path, target)


def test_what_cannot_have_candidates_is_refused(target, tiny_llama):
    parallel = made(PEagle, target, mask_token_id=63)
    with pytest.raises(BadInputError, match="must be an eagle1 or an eagle3 drafter, found 'peagle'"):
        CandidateHead.over(parallel, 4, 4)
    biased = tiny_llama()
    biased.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    among = over(heads(target)["eagle1"], 4, 4)
    with pytest.raises(IncompatibleError, match="output embedding has a bias"):
        among.check(Target(biased))
    with pytest.raises(IncompatibleError, match=r"vllm reads no candidates drafter.*export that one"):
        layout_of("vllm", "candidates")
