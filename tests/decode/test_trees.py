"""Static trees: shapes, and the best of them by brute force."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from outrider.common import BadInputError
from outrider.decode import LOSSLESS, LOSSY, Decoder, Plan, Sampling, Tree, best_tree
from outrider.heads import DraftModel, Eagle3, Eagle3Config
from outrider.targets import Target

RATES = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.1, 0.3], [0.3]]  # not always falling with the rank
PROMPTS = [[5, 1, 7], [3], [9, 9, 2, 4]]


def test_a_trees_facts_by_hand():
    tree = Tree((-1, -1, 0, 0, 1, 3))
    assert (tree.depth, tree.depths, tree.ranks) == (3, (1, 1, 2, 2, 2, 3), (0, 1, 0, 1, 0, 0))
    assert tree.children == {-1: (0, 1), 0: (2, 3), 1: (4,), 2: (), 3: (5,), 4: (), 5: ()}
    expected = 1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.6 * 0.2 + 0.2 * 0.5 + 0.6 * 0.2 * 0.4
    assert tree.value(RATES) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "at least one node"),
        ((0,), "node 0 has parent 0"),
        ((-1, 2, 1), "node 1 has parent 2"),
        ((-2,), "node 0 has parent -2"),
        ((-1, 0, -1), "level by level"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(BadInputError, match=message):
        Tree(parents)


def every_tree(nodes: int) -> set[tuple[int, ...]]:
    """All shapes of that many nodes in level order that the rates have room for."""
    found: set[tuple[int, ...]] = set()

    def grow(parents: tuple[int, ...]) -> None:
        if len(parents) == nodes:
            found.add(parents)
            return
        for parent in range(parents[-1] if parents else -1, len(parents)):
            try:
                tree = Tree((*parents, parent))
            except BadInputError:
                continue
            if tree.depth <= len(RATES) and tree.ranks[-1] < len(RATES[tree.depth - 1]):
                grow(tree.parents)

    grow(())
    return found


@pytest.mark.parametrize("nodes", range(1, 9))
def test_the_best_tree_is_the_best_of_all(nodes):
    values = [Tree(parents).value(RATES) for parents in every_tree(nodes)]
    best = best_tree(RATES, nodes)
    assert len(best.parents) == nodes
    assert best.value(RATES) == pytest.approx(max(values), abs=1e-12)
    assert nodes < 3 or len({round(v, 9) for v in values}) > 1


def test_rates_without_room_for_so_many_nodes_are_refused():
    with pytest.raises(BadInputError, match="no tree of 4 nodes fits into 2 levels with at most 1 children"):
        best_tree([[0.5], [0.5]], 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"depth": -1}, "depth must be >= 0, got -1"),
        ({"width": 0}, "width must be >= 1, got 0"),
        ({"nodes": 4}, "it needs width > 1"),
        ({"width": 2, "nodes": 0}, "must be >= 1, got 0"),
        ({"tree": Tree((-1,)), "width": 2}, "a static tree has its own width"),
        ({"tree": Tree((-1, -1)), "verify": "rejection"}, "'rejection' cannot verify a static tree; these can: auto"),
        ({"width": 2, "verify": "traversal"}, "'traversal' cannot verify a dynamic tree"),
        ({"verify": "without_replacement"}, "'without_replacement' cannot verify a chain"),
        ({"verify": "hope"}, "unknown verification rule 'hope'; known: auto, greedy"),
        ({"depth": 3, "confidence": -0.1}, "confidence is a probability"),
        ({"depth": 3, "confidence": 1.1}, "confidence is a probability"),
        ({"width": 2, "confidence": 0.5}, "dynamic tree already"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan, message):
    with pytest.raises(BadInputError, match=message):
        Plan(**plan)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["auto", "without_replacement", "traversal", "candidates", "coupled"])
def test_of_the_target_itself_the_first_children_are_always_kept(target, itself, rule, temperature):
    """q = p: every round goes down to the deepest level, so τ = depth + 1."""
    plan = Plan(tree=Tree((-1, -1, 0, 0, 2, 4)), verify=rule)
    out = Decoder(target, itself).generate(PROMPTS, 1 + 5 * 5, Sampling(temperature, seed=4), plan)
    if temperature and rule == "candidates":  # the most probable tokens are no samples of p
        assert 1 < out.stats.tau < 5
    else:
        assert out.stats.tau == 5


@pytest.mark.parametrize(
    "plan",
    [Plan(tree=Tree((-1, -1, -1, 0, 0, 1, 3))), Plan(4, width=3, nodes=8), Plan(4, width=3)],
    ids=["static", "dynamic", "all of it"],
)
@pytest.mark.parametrize("rule", ["candidates", "coupled"])
def test_texts_do_not_depend_on_the_tree(target, tiny_llama, plan, rule):
    """Both rules draw what the target says from noise that belongs to the place, whatever was drafted."""
    sampling = Sampling(0.8, top_p=0.95, repetition_penalty=1.1, bad_words=((3, 4),), min_new_tokens=4, seed=7)
    plan = replace(plan, verify=rule)
    plain = Decoder(target).generate(PROMPTS, 20, sampling, Plan(verify=rule)).tokens
    for drafter in (DraftModel(tiny_llama(layers=2, seed=1)), Eagle3.build(Eagle3Config(taps=(0, 2, 4)), target)):
        decoder = Decoder(target, drafter)
        assert decoder.generate(PROMPTS, 20, sampling, plan).tokens == plain
        assert decoder.generate(PROMPTS[1:2], 20, sampling, plan, sequence_ids=[1]).tokens == plain[1:2]


def test_a_tree_at_the_end_of_the_context_becomes_a_chain(tiny_llama):
    target = Target(tiny_llama(layers=2, max_position_embeddings=24))
    drafter = DraftModel(copy.deepcopy(target.model))
    plain = Decoder(target).generate(PROMPTS, 20).tokens
    for plan in (Plan(tree=Tree((-1, -1, 0, 2, 3))), Plan(5, width=2)):
        assert Decoder(target, drafter).generate(PROMPTS, 20, plan=plan).tokens == plain


@pytest.mark.parametrize(
    "plan", [Plan(3), Plan(3, confidence=0.2), Plan(3, width=2), Plan(tree=Tree((-1, -1))), Plan(0)], ids=str
)
def test_no_plan_becomes_lossy_by_itself(plan):
    """Typical acceptance runs where its name is written, and nowhere else."""
    assert LOSSY == ("typical",)
    assert not set(LOSSLESS) & set(LOSSY)
    for rule, temperature, deterministic in product(("auto", *LOSSLESS), (0.0, 0.7), (False, True)):
        with suppress(BadInputError):
            assert replace(plan, verify=rule).rule(temperature, deterministic) in LOSSLESS


def test_a_lossy_rule_says_so(target, tiny_llama):
    decoder = Decoder(target, DraftModel(tiny_llama(layers=2, seed=1)))
    out = decoder.generate(PROMPTS, 20, Sampling(1.0), Plan(3, verify="typical"))
    assert out.rule == "typical"
    assert out.lossy
    assert not Decoder(target).generate(PROMPTS, 2).lossy


@pytest.mark.parametrize("plan", [Plan(depth=0, verify="typical"), Plan(3, verify="typical")])
def test_a_lossy_plan_is_never_called_lossless(target, plan):
    assert Decoder(target).generate(PROMPTS, 1, Sampling(1.0), plan).lossy


def test_alpha_counts_only_what_was_drafted_after_the_kept_path(target, itself):
    """q = p: the first child is always kept; where it has none of its own, nothing was refused after it."""
    out = Decoder(target, itself).generate(PROMPTS, 1 + 2 * 6, plan=Plan(tree=Tree((-1, -1, 1))))
    assert out.stats.alpha() == [1.0]
    assert {r.drafted for rounds in out.rounds for r in rounds} == {3}
    assert {r.reach for rounds in out.rounds for r in rounds} == {1}


def test_a_wide_tree_needs_cache_not_positions(target, tiny_llama):
    short = DraftModel(tiny_llama(layers=2, seed=1, max_position_embeddings=30))
    plain = Decoder(target).generate([[5, 1, 7]], 20).tokens
    assert Decoder(target, short).generate([[5, 1, 7]], 20, plan=Plan(4, width=8, nodes=32)).tokens == plain
