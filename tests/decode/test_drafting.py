"""What is drafted: tokens drawn from what they are scored with, best nodes first.

The target's own processors and filters hold along each path.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.decode import round as stage
from outrider.decode import sampling as drawing
from outrider.decode.rule_table import RULES
from outrider.decode.sampling import (
    DRAFT,
    Context,
    Draft,
    DraftSampler,
    Keys,
    Processors,
    SamplerConfig,
    draw,
    gumbel,
    probabilities,
    shared_gumbel,
)
from outrider.decode.trees import grow_dynamic
from outrider.heads import DraftModel, Proposal
from outrider.targets import Target

from ..closeness import assert_same
from .conftest import random_prompts

VOCAB = 64
PROMPTS = random_prompts(5, 1, 9, 3)


CELLS = 20_000
LOGITS = torch.tensor([1.3, 0.21, -0.4, 0.87, 0.33, -1.7])


def sampler(rule: str, sampling: Sampling, rows: int, vocab: int = 6) -> DraftSampler:
    keys = Keys(sampling.seed, torch.arange(rows), torch.full((rows,), 7))
    return DraftSampler(RULES[rule], SamplerConfig(sampling, None, vocab), keys)


def drawn_and_scored(
    logits: Tensor, token_ids: Tensor | None, sampling: Sampling, patch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Return the law of the next draft, and the one that it will be scored with.

    The first is measured with uniforms on the midpoints of equal cells.
    """
    patch.setattr(drawing, "uniforms", lambda *keys: (torch.arange(CELLS).double() + 0.5) / CELLS)
    picked = sampler("rejection", sampling, CELLS).next_token(logits.expand(CELLS, -1), token_ids)
    assert picked.probs is not None
    return torch.bincount(picked.token, minlength=6).double() / CELLS, picked.probs[0].double()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7), Sampling(1.5, top_k=3), Sampling(1.0, top_p=0.7), Sampling(0.8, min_p=0.2)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pruned", [False, True])
def test_a_draft_of_a_chain_is_drawn_from_the_law_that_it_is_scored_with(sampling, dtype, pruned, monkeypatch):
    """Also where the drafter's logits are bf16 and its vocabulary is smaller than the target's."""
    logits = LOGITS[: 4 if pruned else 6].to(dtype)
    ids = torch.tensor([1, 2, 4, 5]) if pruned else None
    drawn, scored = drawn_and_scored(logits, ids, sampling, monkeypatch)
    assert float((drawn - scored).abs().max()) <= 1 / CELLS
    assert not pruned or scored[[0, 3]].tolist() == [0, 0]
    whole = torch.full((6,), float("-inf")).index_copy(0, torch.arange(6) if ids is None else ids, logits.float())
    assert_same(scored, probabilities(whole, sampling), 6)


def test_drawing_in_bf16_is_caught(monkeypatch):
    monkeypatch.setattr(drawing, "draw", lambda probs, uniform: draw(probs.bfloat16(), uniform))
    drawn, scored = drawn_and_scored(LOGITS, None, Sampling(1.0), monkeypatch)
    assert float((drawn - scored).abs().max()) > 2 / CELLS


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.5, top_k=3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_children_in_a_tree_are_drawn_from_the_law_that_they_are_scored_with(sampling, dtype):
    """Siblings are drawn without replacement: they are the largest of log q + Gumbel noise.

    That q is to the last bit what is remembered; what q excludes is not there.
    """
    logits = torch.randn(4000, 2, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    nodes = torch.tensor([[3, 5]])
    tokens, scores, probs, _ = sampler("traversal", sampling, 4000).children(logits, None, 4, 2, nodes, None)
    assert probs is not None
    assert_same(probs, probabilities(logits.float(), sampling), 6)
    noise = gumbel(sampling.seed, DRAFT, 6, torch.arange(4000)[:, None], torch.full((4000, 1), 7), nodes)
    assert torch.equal(tokens, (probs.double().log() + noise).topk(4).indices)
    assert torch.equal(scores.exp() > 0, probs.gather(2, tokens) > 0)
    assert dtype == torch.bfloat16 or (scores.exp() > 0).sum(-1).unique().tolist() == ([3] if sampling.top_k else [4])
    rounded = (probs.bfloat16().double().log() + noise).topk(4).indices
    assert not torch.equal(tokens, rounded), "a law in bf16 would draw others now and then"


ENDS = list(range(0, VOCAB, 5))
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.8},
    "bad_words": {"bad_words": (*((a, b) for a in range(VOCAB) for b in range(a % 2, VOCAB, 2)), (5, 6, 7), (9,))},
    "min_new_tokens": {"min_new_tokens": 9},
    "suppress": {"suppress": tuple(range(1, VOCAB, 3))},
}
PROCESSORS = SETTINGS["penalty"] | SETTINGS["bad_words"] | SETTINGS["min_new_tokens"] | SETTINGS["suppress"]
SETTINGS["all"] = PROCESSORS | {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
BEHIND = Tree((-1, -1, 0, 0, 2, 4))
SHAPES = {
    "chain, rejection": Plan(4),
    "chain, block": Plan(4, verify="block"),
    "chain, coupled": Plan(4, verify="coupled"),
    "static tree, without replacement": Plan(tree=BEHIND),
    "static tree, traversal": Plan(tree=BEHIND, verify="traversal"),
    "static tree, coupled": Plan(tree=BEHIND, verify="coupled"),
}


def refused(target: Target, kind: str, shape: str, **changes: Any) -> bool:
    """Return whether the target as its own drafter is ever refused where it has drafted, in 24 texts of 16 tokens."""
    target.model.generation_config.eos_token_id = ENDS
    sampling = Sampling(**{"temperature": 1.0, "seed": 2} | SETTINGS[kind] | changes)
    decoder = Decoder(target, DraftModel(copy.deepcopy(target.model)))
    out = decoder.generate(PROMPTS * 6, 16, sampling, SHAPES[shape], ignore_eos=not sampling.min_new_tokens)
    assert sum(r.accepted for rounds in out.rounds for r in rounds) > 50
    return any(alpha < 1 for alpha in out.stats.alpha())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SETTINGS)
def test_processors_and_filters_apply_to_drafter_and_target_alike_along_each_path(target, kind, shape):
    """So q = p at every place: nothing that the target drafts for itself is refused, sampled or greedy."""
    assert not refused(target, kind, shape)
    if SHAPES[shape].verify == "auto":
        assert not refused(target, kind, shape, temperature=0.0)


def the_drafter_ignores(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Plant the bug that concerns one setting, on the drafter's side only."""
    if kind in ("temperature", "top_k", "top_p", "min_p"):
        without = {"temperature": 1.0} if kind == "temperature" else {kind: None}

        def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
            return probabilities(logits, replace(sampling, **without))

        patch.setattr(drawing, "probabilities", filtered)
    else:
        patch.setattr(DraftSampler, "_processed", lambda sampler, logits, token_ids, context: logits.float())


@pytest.mark.parametrize("shape", ["chain, rejection", "static tree, without replacement", "static tree, coupled"])
@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "all"])
def test_a_setting_that_the_drafter_ignores_is_noticed(target, kind, shape, monkeypatch):
    the_drafter_ignores(kind, monkeypatch)
    assert refused(target, kind, shape)


@dataclass(frozen=True)
class Node:
    path: tuple[int, ...]
    score: float


def brute_force(
    drafter: PreTrainedModel, text: list[int], prompt: int, sampling: Sampling, plan: Plan, depth: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by plain passes over whole texts: the paths of its nodes."""
    steps = Processors(sampling, VOCAB, ENDS, torch.device("cpu"))

    def children(path: tuple[int, ...]) -> list[Node]:
        whole = torch.tensor([[*text, *path]])
        logits = drafter(whole, use_cache=False).logits[:, -1:].float()
        drafted = whole[:, prompt:]
        context = steps.start(whole[:, :prompt], torch.tensor([prompt]))
        logits = steps(logits, context.then(drafted, torch.ones(1, 1, drafted.shape[1], dtype=torch.bool)))[0, 0]
        if plan.verify == "coupled":
            log_probs = probabilities(logits, sampling).double().log()
            wanted = log_probs + shared_gumbel(sampling.seed, torch.tensor(0), torch.tensor(whole.shape[1]), VOCAB)
        else:
            log_probs = wanted = logits.log_softmax(-1)
        return [
            Node((*path, t), float(log_probs[t]))
            for t in wanted.topk(plan.width).indices.tolist()
            if log_probs[t] > float("-inf")
        ]

    found: list[Node] = []
    known = [Node((), 0.0)]
    for _ in range(depth):
        level = [Node(child.path, node.score + child.score) for node in known for child in children(node.path)]
        found += level
        known = sorted(level, key=lambda n: -n.score)[: plan.width]
    return {n.path for n in sorted(found, key=lambda n: -n.score)[: plan.max_nodes]}


def paths_of(proposal: Proposal) -> set[tuple[int, ...]]:
    assert proposal.parents is not None
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens[0].tolist(), proposal.parents[0].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return {path for path, real in zip(found, proposal.real[0].tolist(), strict=True) if real}


@pytest.mark.parametrize("plan", [Plan(3, width=3), Plan(4, width=2, nodes=5), Plan(2, width=4, nodes=20)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "processed", "coupled"])
def test_a_dynamic_tree_holds_the_most_probable_paths(target, tiny_llama, plan, kind, monkeypatch):
    """Its nodes are those of a brute-force search over whole texts, round after round."""
    target.model.generation_config.eos_token_id = None if kind == "plain" else ENDS
    samplings = {"plain": Sampling(), "processed": Sampling(**PROCESSORS), "coupled": Sampling(0.8, top_k=20, seed=5)}
    sampling = samplings[kind]
    plan = replace(plan, verify="coupled") if kind == "coupled" else plan
    drafter, grown = tiny_llama(layers=2, seed=3), []

    def spy(*arguments: Any) -> Draft:
        draft = grow_dynamic(*arguments)
        grown.append(draft.proposal)
        return draft

    monkeypatch.setattr(stage, "grow_dynamic", spy)
    text = list(PROMPTS[0])
    events = list(Decoder(target, DraftModel(drafter)).stream(PROMPTS[0], 12, sampling, plan))
    assert len(events) == len(grown) + 1 > 3
    for event, proposal in zip(events, grown, strict=False):
        text += event.tokens
        assert paths_of(proposal) == brute_force(drafter, text, len(PROMPTS[0]), sampling, plan, plan.depth)


def test_a_dynamic_tree_that_does_not_see_its_own_paths_is_caught(target, tiny_llama, monkeypatch):
    honest = Context.then
    drafter = tiny_llama(layers=2, seed=3)
    plan, sampling = Plan(3, width=3), Sampling(**PROCESSORS | {"suppress": ()})
    target.model.generation_config.eos_token_id = ENDS
    grown: list[Proposal] = []

    def blind(*arguments: Any) -> Draft:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Context, "then", lambda context, tokens, path: honest(context, tokens, path & False))
            draft = grow_dynamic(*arguments)
        grown.append(draft.proposal)
        return draft

    monkeypatch.setattr(stage, "grow_dynamic", blind)
    text, differing = list(PROMPTS[0]), 0
    events = list(Decoder(target, DraftModel(drafter)).stream(PROMPTS[0], 12, sampling, plan))
    for event, proposal in zip(events, grown, strict=False):
        text += event.tokens
        differing += paths_of(proposal) != brute_force(drafter, text, len(PROMPTS[0]), sampling, plan, plan.depth)
    assert differing > 0
