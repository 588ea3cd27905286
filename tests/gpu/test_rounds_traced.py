"""Rounds of fixed shapes can be captured on a GPU: nothing in them asks the host, and they launch no more kernels.

Every drafter with such rounds, in every shape and under every rule that judges it. The budget of kernels stands in
`launches.json`; `OUTRIDER_WRITE_LAUNCHES=1 ./scripts/test --fast -n 0 tests/gpu -m 'slow or not slow'`
writes it anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Plan, Sampling, Tree
from outrider.decode.round import RoundSetup, RoundState, step
from outrider.decode.rule_table import RULES, DraftShape
from outrider.decode.sampling import Processors, SamplerConfig
from outrider.decode.static_batch import StaticBatch
from outrider.heads import Abilities, Drafter
from outrider.targets import RowLengths, Target

from ..heads.test_drafters import MAKERS
from ..targets.small_models import NO_IDS, VOCAB, small_model
from .fake_cuda import Trace, fake_cuda, on_fake_cuda

BUDGET = Path(__file__).with_name("launches.json")
ROWS, WINDOW = 2, 256
SHAPES = {
    DraftShape.CHAIN: {"depth": 3},
    DraftShape.STATIC: {"tree": Tree((-1, -1, 0, 0, 1, 2))},
    DraftShape.DYNAMIC: {"depth": 3, "width": 2, "nodes": 5},
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, top_p=0.9, seed=3),
    "processed": Sampling(0.9, repetition_penalty=1.3, seed=5, suppress=(1, 2), bad_words=((3, 5), (7, 8, 9))),
}
FIXED = ("draft_model", "eagle1", "eagle3", "medusa", "hydra", "mtp", "self_speculative")
DRAFTERS = ["plain", *(name for name in MAKERS if name.split()[0] in FIXED)]


@pytest.fixture(scope="module", autouse=True)
def budget() -> Iterator[dict[str, int]]:
    """The launches that are allowed, by what they are for; found ones are written if that is asked for."""
    allowed: dict[str, int] = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    yield allowed
    if os.environ.get("OUTRIDER_WRITE_LAUNCHES"):
        BUDGET.write_text(json.dumps(dict(sorted(allowed.items())), indent=1) + "\n")


def plans(every_rule: bool) -> Iterator[tuple[str, Plan]]:
    """Yield every shape, with `every_rule` also under each that judges it, and a chain that ends early."""
    for shape, how in SHAPES.items():
        yield shape.value, Plan(**how)
        for rule in RULES.values() if every_rule else ():
            if shape in rule.shapes and rule.name != "greedy":
                yield f"{shape.value}, {rule.name}", Plan(**how, verify=rule.name)
    yield "confidence", Plan(3, confidence=0.3)


def opened(target: Target, drafter: Drafter | None, plan: Plan, sampling: Sampling) -> tuple[RoundSetup, RoundState]:
    """Return a request on the fake device, after its prompts of 5 and 3 tokens."""
    abilities = Abilities() if drafter is None else drafter.abilities
    batch = StaticBatch(target, drafter, ROWS, WINDOW, 16)
    processors = Processors(sampling, VOCAB, frozenset(), target.device)
    config = SamplerConfig(sampling, None if processors.idle else processors, VOCAB)
    setup = RoundSetup(target, plan, config, abilities, () if drafter is None else drafter.taps, may_sync=False)
    tokens, counts = torch.zeros(ROWS, 5, dtype=torch.long, device="cuda"), RowLengths.of([5, 3], "cuda")
    for cache_ in (batch.cache, *batch.session.caches()):
        cache_.window = WINDOW
    out = target.forward(tokens, batch.cache, setup.taps, at=counts.tensor[:, None] - 1)
    batch.cache.advance(counts)
    batch.session.update(tokens, out.hidden, counts)
    context = None if processors.idle else processors.start(tokens, counts.tensor)
    rows, seed = torch.arange(ROWS, device="cuda"), torch.zeros((), dtype=torch.long, device="cuda")
    return setup, RoundState(tokens[:, 0], rows, seed, None, context, batch.cache, batch.session)


def trace(target: Target, drafter: Drafter | None, plan: Plan, sampling: Sampling) -> Trace:
    """Return what a round does that could be captured: the first makes tables, the second is captured."""
    setup, state = opened(target, drafter, plan, sampling)
    state, _ = step(setup, state, plan.depth)
    with Trace() as traced:
        after, _ = step(setup, state, plan.depth)
    assert [t.shape for t in after.tensors()] == [t.shape for t in state.tensors()], "a graph leaves the shapes"
    return traced


def check(
    kind: str, name: str, tiny_llama: Callable, budget: dict[str, int], samplings: Any, every: bool, only: str = ""
) -> None:
    """Trace the rounds of a drafter on one kind of target; those of the plan `only`, if it is named."""
    sizes = {"num_hidden_layers": 6, "head_dim": 8, "max_position_embeddings": 512}
    model = tiny_llama(layers=6) if kind == "llama" else small_model("qwen3", **sizes, **NO_IDS)
    target = Target(model)
    torch.manual_seed(3)
    drafter = None if name == "plain" else MAKERS[name](target, tiny_llama)
    with fake_cuda():
        on_fake_cuda(model, drafter)
        named = [("plain", Plan(0))] if drafter is None else plans(every)
        for what, plan in ((what, plan) for what, plan in named if only in ("", what)):
            for how in samplings:
                launches = trace(Target(model), drafter, plan, SAMPLINGS[how]).kernels.total()
                key = f"{kind} | {name} | {what} | {how}"
                if os.environ.get("OUTRIDER_WRITE_LAUNCHES"):
                    budget[key] = launches
                assert launches <= budget[key], f"{key}: {launches} kernels, {budget[key]} are allowed"


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_can_be_captured_and_launch_no_more_than_they_did(name, tiny_llama, budget):
    check("llama", name, tiny_llama, budget, ["sampled"], every=False)


@pytest.mark.parametrize("what", [what for what, _ in plans(every_rule=True)])
def test_rounds_can_be_captured_under_every_rule(what, tiny_llama, budget):
    check("qwen3", "eagle3", tiny_llama, budget, ["sampled"], every=True, only=what)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_all_rounds_can_be_captured(kind, name, tiny_llama, budget):
    check(kind, name, tiny_llama, budget, SAMPLINGS, every=True)
