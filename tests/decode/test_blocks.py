"""Block drafters in the decoder: exact laws by enumeration, golden vectors, confidences, schedules, and planted faults.

The drafters' sessions, the samplers, the rules and the growers are the real ones; what the block's pass says is given,
since the laws are of distributions that are known as fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Costs, Decoder, Plan, Sampling, Schedule
from outrider.decode import round as stage
from outrider.decode.round import RoundSetup, RoundState, draft
from outrider.decode.rule_table import RULES
from outrider.decode.rules import block, rejection
from outrider.decode.sampling import DraftSampler, Keys, NextToken, SamplerConfig
from outrider.decode.trees import grow_dynamic
from outrider.heads import HEADS, Abilities, DFlash, DFlash2, DFlash2Config, DFlashConfig, DSpark, DSparkConfig
from outrider.targets import Target

from ..closeness import assert_same, both_precisions, tolerance
from ..conftest import installed
from .conftest import random_prompts
from .test_drafting import paths_of
from .test_rules import EXACT, Rule, Trees, bias, cut_to, enumerate_round, on_chain, paths, places_of, source

SUMS = 3 * 4 * 3  # over three symbols, of terms of four operations, in each of three drafts
RULES_FOR_CHAINS = pytest.mark.parametrize("rule", [rejection, block])
# The first-order chain of the golden vectors: the first token's law, and the rows of the token before.
INIT = [Fraction(3, 8), Fraction(3, 16), Fraction(7, 16)]
ROWS = [
    [Fraction(2, 9), Fraction(2, 3), Fraction(1, 9)],
    [Fraction(1, 8), Fraction(7, 16), Fraction(7, 16)],
    [Fraction(9, 17), Fraction(7, 17), Fraction(1, 17)],
]


def after(law: list[Fraction]) -> list[Fraction]:
    return [sum(law[x] * ROWS[x][y] for x in range(3)) for y in range(3)]


MARGINALS = [INIT, after(INIT), after(after(INIT))]
TARGET = source(*ROWS, INIT)


def law_of(prefix: tuple[int, ...]) -> list[Fraction]:
    """The target's law of the token after `prefix` `[.]`."""
    return ROWS[prefix[-1]] if prefix else INIT


@pytest.fixture
def target(tiny_llama) -> Target:
    """V = 3, whose output embedding gives a state's first three values as logits."""
    model = tiny_llama(layers=2, hidden=8, vocab=3, num_attention_heads=2, num_key_value_heads=1)
    model.lm_head.weight.data = torch.eye(3, 8)
    return Target(model)


def states_of(marginals: list[list[Fraction]]) -> Tensor:
    """States `[1, k, H]` that say the marginals."""
    logits = source(*marginals).log().float()
    return torch.nn.functional.pad(logits, (0, 5))[None]


def marginal_session(target: Target, marginals: list[list[Fraction]] = MARGINALS, rows: int = 1):
    drafter = DFlash.build(DFlashConfig(num_layers=1, block_size=4, mask_token_id=1, taps=(1,)), target)
    session = drafter.open(target, rows, 40)
    session.draft = lambda root: states_of(marginals).expand(len(root), -1, -1)
    return session


def markov_session(target: Target, kind: str = "vanilla"):
    """A perfect Markov head over a constant block: rank V is enough for log P. Tokens 0 to 2; the root is 0.

    The first draft's row is that of the root; its law is put into the block's first state.
    """
    config = DSparkConfig(num_layers=1, block_size=3, mask_token_id=1, taps=(1,), markov_rank=3, markov_head=kind)
    drafter = DSpark.build(config, target)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(3))
        drafter.markov_head.markov_w2.weight.copy_(source(*ROWS).log().T)
    session = drafter.open(target, 1, 40)
    first = [a / b for a, b in zip(INIT, ROWS[0], strict=True)]  # what the root's row is corrected by
    session.draft = lambda root: states_of([first, [Fraction(1)] * 3, [Fraction(1)] * 3]).expand(len(root), -1, -1)
    return session


def selecting_session(target: Target, top_k: int):
    """A selector of random codebooks over the marginals."""
    config = DFlash2Config(num_layers=1, block_size=4, mask_token_id=1, taps=(1,), conv_group_size=4, selector_rank=3)
    torch.manual_seed(5)
    drafter = DFlash2.build(replace(config, selector_top_k=top_k), target)
    torch.nn.init.normal_(drafter.candidate_selector.successor_codebook.weight)
    session = drafter.open(target, 1, 40)
    session.draft = lambda root: states_of(MARGINALS).expand(len(root), -1, -1)
    return session


def correlating_session(target: Target, top_k: int):
    """A transformer of random weights over the marginals' candidates."""
    sizes = {"candidate_topk": top_k, "num_heads": 2, "logit_scale": 2.0}
    head: Any = HEADS["lilicorr"]
    settings = {f"lilicorr_{name}": size for name, size in sizes.items()}
    torch.manual_seed(5)
    drafter = head.build(head.config_class(num_layers=1, block_size=4, mask_token_id=1, taps=(1,), **settings), target)
    for weight in drafter.lilicorr.parameters():
        torch.nn.init.normal_(weight)
    session = drafter.open(target, 1, 40)
    session.draft = lambda root: states_of(MARGINALS).expand(len(root), -1, -1)
    session.carry([torch.randn(1, target.hidden_size)])
    return session


CHOOSING = installed({"dflash2": selecting_session, "lilicorr": correlating_session})


def drafted(session, depth: int = 3) -> Trees:
    """All chains that a session can draft, with its law of each draft."""
    tokens = paths(3, depth)
    q = torch.stack([drafted_rows(session, tuple(path)) for path in tokens.tolist()])
    weights = q.gather(2, tokens[:, :, None])[:, :, 0].prod(1)
    possible = weights > 0
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))  # nothing is drafted after the last one
    laws = TARGET[places_of(tokens)][possible], q[possible]
    return Trees(list(range(-1, depth - 1)), tokens[possible], weights[possible], *laws)


def drafted_rows(session, path: tuple[int, ...]) -> Tensor:
    """The session's law of each draft of a chain, `[len(path), V]`."""
    with torch.inference_mode():
        found = [session.prefill(torch.tensor([0]))]
        found += [session.decode(torch.tensor([[token]]))[:, 0] for token in path[:-1]]
    return torch.cat(found).double().softmax(-1)


@both_precisions
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (rejection, [1, Fraction(376949, 208896), Fraction(8221493803169, 3338271719424)]),
        (block, [1, Fraction(376949, 208896), Fraction(4183899930637, 1669135859712)]),
    ],
)
def test_marginals_of_one_pass_are_lossless_and_accept_what_they_should(target, rule, expected):
    """Drafts that know nothing of each other, scored by the marginals that they were drawn from."""
    for depth, accepted in enumerate(expected, 1):
        trees = drafted(marginal_session(target), depth)
        assert bias(on_chain(rule), trees, TARGET) < EXACT
        assert_same(enumerate_round(on_chain(rule), trees).mean_accepted(), float(accepted), SUMS)


@RULES_FOR_CHAINS
def test_a_narrow_support_is_lossless(target, rule):
    """A selector says a few tokens only: the others have probability 0, exactly."""
    third, never = Fraction(1, 3), Fraction(0)
    narrow = [[Fraction(1, 2), Fraction(1, 2), never], [never, third, 2 * third], [never, Fraction(1), never]]
    session = marginal_session(target)
    logits = source(*narrow).float().log().clamp(min=-1e4)
    session.draft = lambda _: torch.nn.functional.pad(logits, (0, 5))[None]
    trees = drafted(session)
    assert len(trees.tokens) == 4
    assert bias(on_chain(rule), trees, TARGET) < EXACT


@both_precisions
@RULES_FOR_CHAINS
def test_a_perfect_markov_head_has_every_draft_accepted(target, rule, precision):
    """Rank V is enough for log P of a first-order target over a block that says nothing: τ = k + 1."""
    trees = drafted(markov_session(target))
    # q is p but for single precision, so that block verification divides differences of that size.
    assert bias(on_chain(rule), trees, TARGET) < (EXACT if rule is rejection else tolerance(precision, SUMS))
    assert_same(enumerate_round(on_chain(rule), trees).mean_accepted(), 3.0, SUMS)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@RULES_FOR_CHAINS
def test_drafts_of_any_markov_head_are_lossless(target, rule, kind):
    torch.manual_seed(5)
    session = markov_session(target, kind)
    for weight in session.drafter.markov_head.parameters():
        torch.nn.init.normal_(weight)
    first, second = drafted_rows(session, (0, 0, 0)), drafted_rows(session, (1, 2, 0))
    assert not torch.allclose(first[1:], second[1:]), "the head has an effect"
    assert bias(on_chain(rule), drafted(session), TARGET) < EXACT


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("kind", CHOOSING)
@RULES_FOR_CHAINS
def test_drafts_that_are_chosen_of_candidates_are_lossless(target, rule, kind, top_k):
    """Of two candidates each, 8 of the 27 chains can be drafted; which of the two depends on the draft before."""
    choosing = CHOOSING[kind]
    trees = drafted(choosing(target, top_k))
    assert len(trees.tokens) == top_k**3
    if top_k > 1:
        firsts = drafted_rows(choosing(target, top_k), (0,))[0].nonzero()[:, 0].tolist()[:2]
        first, second = (drafted_rows(choosing(target, top_k), (one, 0))[1] for one in firsts)
        assert not torch.allclose(first, second), "the choice has an effect"
    assert bias(on_chain(rule), trees, TARGET) < EXACT


@pytest.mark.parametrize("kind", CHOOSING)
def test_a_tree_of_candidates_has_the_chains_conditionals(target, kind):
    """Two candidates after each of the three best nodes of a level, and no other token, however many are asked for."""
    session = CHOOSING[kind](target, 2)
    nodes = grown(session, 20)
    assert len(nodes) == 2 + 4 + 6
    for path in nodes:
        assert all(row[token] > 0 for row, token in zip(drafted_rows(session, path), path, strict=True))


@pytest.mark.parametrize(
    ("drawn", "emitted"),
    [
        (MARGINALS[1], [9 / 17, 7 / 17, 1 / 17]),
        ([0, 1, 0], [437 / 2229, 1792 / 2229, 0]),
        (ROWS[2], [47744027 / 73929243, 12544 / 37893, 768 / 33167]),
    ],
    ids=["as scored", "the most probable", "another law"],
)
def test_planted_faults_of_scoring_are_what_they_were_in_the_field(drawn, emitted):
    """After a first token 2: drafts of one law that are scored with another one bias the text."""
    p, q = source(ROWS[2], INIT).expand(3, -1, -1), source(MARGINALS[1], MARGINALS[1]).expand(3, -1, -1)
    trees = Trees([-1], torch.arange(3)[:, None], source(drawn)[0], p, q)
    law = enumerate_round(on_chain(rejection), trees).law(TARGET, 2).view(3, 3).sum(1)
    assert law.tolist() == pytest.approx(emitted, abs=1e-12)


def reached(nodes: set[tuple[int, ...]]) -> Fraction:
    """The mean number of nodes that the target's own draws walk through."""
    return sum((math.prod(law_of(n[:i])[n[i]] for i in range(len(n))) for n in nodes), Fraction(0))


def grown(session, count: int, width: int = 3) -> set[tuple[int, ...]]:
    """The paths to the nodes of the best tree."""
    config, keys = SamplerConfig(Sampling(0.0), None, 3), Keys(0, torch.zeros(1).long(), torch.ones(1))
    with torch.inference_mode():
        sampler = DraftSampler(RULES["greedy"], config, keys)
        return paths_of(grow_dynamic(session, torch.tensor([0]), width, count, 3, sampler).proposal)


@pytest.mark.parametrize(
    ("count", "marginals", "conditionals"),
    [
        (1, Fraction(7, 16), Fraction(7, 16)),
        (3, Fraction(135, 136), Fraction(17, 16)),
        (6, Fraction(113, 68), Fraction(113, 68)),
        (10, Fraction(3289, 1632), Fraction(3457, 1632)),
    ],
)
def test_golden_trees(target, count, marginals, conditionals):
    """The best products of marginals, and of a perfect Markov head's conditionals, by how far the target follows."""
    assert reached(grown(marginal_session(target), count, 9)) == marginals
    assert reached(grown(markov_session(target), count, 9)) == conditionals


def test_the_best_six_nodes_of_the_marginals(target):
    assert grown(marginal_session(target), 6, 9) == {(2,), (0,), (2, 1), (0, 1), (1,), (2, 0)}


def test_a_tree_of_width_one_is_the_chain(target):
    for session in (marginal_session(target), markov_session(target)):
        (path,) = [n for n in grown(session, 3, 1) if len(n) == 3]
        assert path == tuple(drafted_rows(session, path).argmax(1).tolist())


@dataclass(frozen=True)
class Forced(DraftSampler):
    """A sampler that draws the tokens of a given path."""

    path: tuple[int, ...] = ()

    def _pick(self, logits: Tensor, depth: int) -> NextToken:
        token = torch.full((len(logits),), self.path[depth])
        return super()._pick(logits, depth)._replace(token=token, place=token)


def confident_session(target: Target, odds: dict[tuple[int, ...], float]):
    """A session whose confidence in the next draft is given for each prefix of drafts."""
    session = markov_session(target)
    torch.manual_seed(5)
    torch.nn.init.normal_(session.drafter.markov_head.markov_w2.weight)
    said: list[int] = []
    begin, extend = session.prefill, session.decode
    session.prefill = lambda root: said.clear() or begin(root)
    session.decode = lambda tokens, parents=None: said.append(int(tokens[0, 0])) or extend(tokens, parents)
    session.confidence = lambda: torch.tensor([odds.get(tuple(said), 1.0)], dtype=torch.float64)
    return session


ODDS = {(): 0.9, (0,): 0.9, (1,): 0.4, (2,): 0.8, (0, 0): 0.3, (0, 2): 0.9, (2, 1): 0.95, (2, 0): 0.5}


def told_length(target: Target, session, path: tuple[int, ...], threshold: float) -> int:
    plan = Plan(len(path), confidence=threshold)
    config, abilities = SamplerConfig(Sampling(1.0), None, 3), Abilities(confident=True)
    setup = RoundSetup(target, plan, config, abilities, may_sync=False)
    row = torch.zeros(1, dtype=torch.long)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "DraftSampler", partial(Forced, path=path))
        state = RoundState(row, row, 0, None, None, target.new_cache(1, 8), session)
        return int(draft(setup, state, len(path)).proposal.lengths[0])


def ending(rule, lengths: dict[tuple[int, ...], int]) -> Rule:
    return cut_to(lambda drafts, _: torch.tensor([lengths[tuple(path)] for path in drafts.tolist()]), rule)


@RULES_FOR_CHAINS
def test_a_chain_that_ends_by_what_stands_before_it_is_lossless(target, rule):
    """Draft j is proposed if c_1 … c_j reach the threshold; c_j knows the drafts before j."""
    session = confident_session(target, ODDS)
    lengths = {path: told_length(target, session, path, 0.6) for path in product(range(3), repeat=3)}
    assert set(lengths.values()) == {1, 2, 3}
    trees = drafted(session)
    assert bias(ending(rule, lengths), trees, TARGET) < EXACT
    # The fault: c_{j + 1} decides about draft j, which it has read.
    late = {path: length - (length < 3) for path, length in lengths.items()}
    assert bias(ending(rule, late), trees, TARGET) > 0.01


@both_precisions
def test_the_papers_example_of_a_biased_schedule():
    """DSpark, arXiv 2607.05147, appendix A: a search past the first loss emits (.85, .15) where p is (.7, .3)."""
    schedule = Schedule(Costs(verify=((0, 1.0), (1, 2.0), (2, 1 / 0.45)), draft=(0.0, 0.0)), rates=(0.5,))
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()

    def law(lengths: dict[int, int]) -> list[float]:
        """Of the first emitted token; draft 0 or 1, which is verified if its length is not 0."""
        found = torch.zeros(2)
        for token, length in lengths.items():
            kept = min(1.0, float(p[token] / q[token]))
            one_hot = torch.eye(2)[token]
            found += q[token] * ((kept * one_hot + (1 - kept) * residual) if length else p)
        return found.tolist()

    reach = {0: torch.tensor([[0.8, 0.8 * 0.9]]), 1: torch.tensor([[0.8, 0.0]])}
    ours = {token: int(schedule.lengths(r)[0]) for token, r in reach.items()}
    assert_same(law(ours), [0.7, 0.3], SUMS)
    searched = {token: best_prefix(r, schedule.costs) for token, r in reach.items()}
    assert searched == {0: 2, 1: 0}
    assert_same(law(searched), [0.85, 0.15], SUMS)


def best_prefix(reach: Tensor, costs: Costs) -> int:
    """The fault: the number of drafts of one row with the best throughput of all."""
    speeds = [(1 + float(reach[0, :m].sum())) / costs.round_time(0, m) for m in range(reach.shape[1] + 1)]
    return max(range(len(speeds)), key=speeds.__getitem__)


def throughput(reach: Tensor, lengths: tuple[int, ...], costs: Costs) -> float:
    gained = len(reach) + sum(float(row[:n].sum()) for row, n in zip(reach, lengths, strict=True))
    return gained / costs.round_time(reach.shape[1], sum(lengths) / len(reach))


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_the_best_of_all_prefixes_where_throughput_has_one_peak(seed):
    """Brute force over all ways to cut 4 rows of 2 drafts; passes that cost more and more have one peak."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.rand(4, 2, generator=generator, dtype=torch.float64).cumprod(1)
    costs = Costs(verify=tuple((n, 1 + 0.15 * n**2) for n in range(3)), draft=(0.0, 0.1, 0.1))
    found = tuple(Schedule(costs, rates=(0.5,)).lengths(reach).tolist())
    best = max(product(range(3), repeat=4), key=lambda lengths: throughput(reach, lengths, costs))
    assert throughput(reach, found, costs) == pytest.approx(throughput(reach, best, costs))


def test_nothing_is_dropped_where_a_wider_pass_costs_no_more():
    reach = torch.rand(5, 4, generator=torch.Generator().manual_seed(1)).cumprod(1)
    schedule = Schedule(Costs(verify=((0, 1.0),), draft=(0.0, 0.1)), rates=(0.5,))
    assert schedule.lengths(reach).tolist() == [4] * 5


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("how", ["threshold", "schedule"])
def test_text_is_the_targets_whatever_confidences_say(tiny_llama, how, static):
    """Greedily and under the coupled rule, ragged: rows propose different numbers of drafts, none included."""
    target = Target(tiny_llama(layers=6))
    torch.manual_seed(3)
    drafter = DSpark.build(DSparkConfig(num_layers=1, markov_rank=8, block_size=4), target)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight)
    prompts = random_prompts(5, 1, 9)
    costs = Costs(verify=((0, 1.0), (4, 1.2)), draft=(0.0, 0.1))
    for sampling, verified in ((Sampling(0.0), "auto"), (Sampling(1.0, seed=3), "coupled")):
        chosen = {"confidence": 0.3} if how == "threshold" else {"control": Schedule(costs, rates=(0.5,))}
        plan = Plan(4, verify=verified, **chosen)
        assert Plan.from_dict(plan.to_dict()) == plan
        out = Decoder(target, drafter, static).generate(prompts, 24, sampling, plan, ignore_eos=True)
        expected = Decoder(target).generate(prompts, 24, sampling, Plan(0, verify=verified), ignore_eos=True)
        assert out.tokens == expected.tokens
        assert len({one.drafted for rounds in out.rounds for one in rounds}) > 1
