"""Block drafters in the decoder: exact laws by enumeration, golden vectors, confidences, schedules, and planted faults.

The drafters' sessions, the samplers, the rules and the growers are the real ones; what the block's pass says is given,
since the laws are of distributions that are known as fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.decode import Costs, Decoder, Plan, Sampling, Schedule, rules
from outrider.decode.drafting import (
    ChainDraft,
    DraftSampler,
    NextToken,
    SamplerConfig,
    grow_dynamic,
    propose_confidently,
)
from outrider.decode.rules import RULES
from outrider.decode.sampling import Keys
from outrider.heads import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.targets import Target

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


def law_of(prefix: tuple[int, ...]) -> list[Fraction]:
    """The target's law of the token after `prefix` `[.]`."""
    return ROWS[prefix[-1]] if prefix else INIT


def tensor(rows: list) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


@pytest.fixture
def target(tiny_llama) -> Target:
    """V = 3, whose output embedding gives a state's first three values as logits."""
    model = tiny_llama(layers=2, hidden=8, vocab=3, num_attention_heads=2, num_key_value_heads=1)
    model.lm_head.weight.data = torch.eye(3, 8)
    return Target(model)


def states_of(marginals: list[list[Fraction]]) -> Tensor:
    """States `[1, k, H]` that say the marginals."""
    logits = tensor(marginals).log().float()
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
        drafter.markov_head.markov_w2.weight.copy_(tensor(ROWS).log().T)
    session = drafter.open(target, 1, 40)
    first = [a / b for a, b in zip(INIT, ROWS[0], strict=True)]  # what the root's row is corrected by
    session.draft = lambda root: states_of([first, [Fraction(1)] * 3, [Fraction(1)] * 3]).expand(len(root), -1, -1)
    return session


# ------------------------------------------------------------ laws

Laws = dict[tuple[int, ...], float]


@pytest.fixture
def residuals(monkeypatch) -> list[Tensor]:
    """What the rules draw the token after the accepted ones from, instead of one draw of it."""
    found: list[Tensor] = []
    monkeypatch.setattr(rules, "draw", lambda probs, u: found.append(probs) or torch.zeros(len(probs)).long())
    return found


def outcomes(name: str, p: Tensor, q: Tensor, path: tuple[int, ...], length: int, residuals: list[Tensor]):
    """The real rule's verdicts on a path: (accepted, probability, law of the token that follows)."""
    rule = {"rejection": rules.rejection, "block": rules.block}[name]
    chances = acceptances(name, p, q, path, length)
    for passes in product((True, False), repeat=length):
        share, uniforms = 1.0, [0.5] * len(path)
        for i, (chance, wanted) in enumerate(zip(chances, passes, strict=True)):
            share *= chance if wanted else 1 - chance
            uniforms[i] = chance / 2 if wanted else (1 + chance) / 2
        if share > 0:
            residuals.clear()
            drafts, drawn = torch.tensor([path]), torch.tensor([uniforms], dtype=torch.float64)
            arguments = (p[None], q[None, : len(path)], drawn, torch.zeros(1, dtype=torch.float64))
            accepted, _ = rule(drafts, torch.tensor([length]), *arguments)
            yield int(accepted[0]), share, residuals[-1][0] / residuals[-1][0].sum()


def acceptances(name: str, p: Tensor, q: Tensor, path: tuple[int, ...], length: int) -> list[float]:
    """How probable each draft's own uniform passes: min(1, p/q), or block verification's h."""
    ratios = [float(p[i, token] / q[i, token]) for i, token in enumerate(path[:length])]
    if name == "rejection":
        return [min(1.0, r) for r in ratios]
    worth, found = 1.0, []
    for i, ratio in enumerate(ratios, 1):
        worth = min(1.0, worth * ratio)
        left = float((worth * p[i] - q[i]).clamp(min=0).sum()) if i < length else 0.0
        found.append(worth if i == length else left / (left + 1 - worth) if left + 1 - worth else 1.0)
    return found


def emitted(session, name: str, residuals: list[Tensor], depth: int = 3, length=None) -> tuple[Laws, float]:
    """The law of what one round emits, and its mean number of accepted drafts, over all chains of drafts.

    `length` says of a chain how much of it is proposed; None for all.
    """
    law: Laws = {}
    mean = 0.0
    for path in product(range(3), repeat=depth):
        q = drafted_rows(session, path)[:depth]
        weight = float(torch.stack([q[i, token] for i, token in enumerate(path)]).prod())
        if not weight:
            continue
        p = tensor([law_of(path[:i]) for i in range(depth + 1)])
        count = depth if length is None else length(path)
        for accepted, share, rest in outcomes(name, p, q, path, count, residuals):
            mean += weight * share * accepted
            for token in range(3):
                text = (*path[:accepted], token)
                law[text] = law.get(text, 0.0) + weight * share * float(rest[token])
    return law, mean


def drafted_rows(session, path: tuple[int, ...]) -> Tensor:
    """The session's law of each draft of a chain, `[len(path), V]`."""
    with torch.inference_mode():
        found = [session.prefill(torch.tensor([0]))]
        found += [session.decode(torch.tensor([[token]]))[:, 0] for token in path[:-1]]
    return torch.cat(found).double().softmax(-1)


def distance(law: Laws, depth: int = 3) -> float:
    """Total variation from the target's law of depth + 1 tokens; what is emitted goes on as the target alone would."""
    whole: Laws = dict.fromkeys(product(range(3), repeat=depth + 1), 0.0)
    truth = {text: probability(text) for text in whole}
    for text, weight in law.items():
        for rest in product(range(3), repeat=depth + 1 - len(text)):
            whole[*text, *rest] += weight * probability((*text, *rest), len(text))
    return 0.5 * sum(abs(whole[text] - truth[text]) for text in whole)


def probability(text: tuple[int, ...], given: int = 0) -> float:
    """The target's probability of `text` after its first `given` tokens."""
    found = 1.0
    for i in range(given, len(text)):
        found *= float(law_of(text[:i])[text[i]])
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("rejection", [1, Fraction(376949, 208896), Fraction(8221493803169, 3338271719424)]),
        ("block", [1, Fraction(376949, 208896), Fraction(4183899930637, 1669135859712)]),
    ],
)
def test_marginals_of_one_pass_are_lossless_and_accept_what_they_should(target, residuals, rule, expected):
    """Drafts that know nothing of each other, scored by the marginals that they were drawn from."""
    for depth, accepted in enumerate(expected, 1):
        law, mean = emitted(marginal_session(target), rule, residuals, depth)
        assert distance(law, depth) < 1e-12
        assert mean == pytest.approx(float(accepted), abs=1e-6)  # the drafter's own logits are single precision


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_narrow_support_is_lossless(target, residuals, rule):
    """A selector says a few tokens only: the others have probability 0, exactly."""
    never = Fraction(1, 10**400)
    narrow = [
        [Fraction(1, 2), Fraction(1, 2), never],
        [never, Fraction(1, 3), Fraction(2, 3)],
        [never, Fraction(1), never],
    ]
    session = marginal_session(target, MARGINALS)
    logits = torch.tensor([[[float(x) for x in row] for row in narrow]]).clamp(min=1e-38).log()
    logits[logits < -80] = -1e4
    session.draft = lambda _: torch.nn.functional.pad(logits, (0, 5))
    law, _ = emitted(session, rule, residuals)
    assert distance(law) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_perfect_markov_head_has_every_draft_accepted(target, residuals, rule):
    """Rank V is enough for log P of a first-order target over a block that says nothing: τ = k + 1."""
    law, mean = emitted(markov_session(target), rule, residuals)
    # q is p but for single precision, so that block verification divides differences of that size.
    assert distance(law) < (1e-12 if rule == "rejection" else 1e-7)
    assert mean == pytest.approx(3, abs=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_of_any_markov_head_are_lossless(target, residuals, rule, kind):
    torch.manual_seed(5)
    session = markov_session(target, kind)
    for weight in session.drafter.markov_head.parameters():
        torch.nn.init.normal_(weight)
    first, second = drafted_rows(session, (0, 0, 0)), drafted_rows(session, (1, 2, 0))
    assert not torch.allclose(first[1:], second[1:]), "the head has an effect"
    law, _ = emitted(session, rule, residuals)
    assert distance(law) < 1e-12


def test_planted_faults_of_scoring_are_what_they_were_in_the_field(residuals):
    """After a first token 2: drafts of one law that are scored with another one bias the text."""
    p, q = tensor([ROWS[2], INIT]), tensor([MARGINALS[1]])
    best = [Fraction(0), Fraction(1), Fraction(0)]

    def law(drawn: list[Fraction]) -> list[float]:
        found = [0.0] * 3
        for token in range(3):
            for accepted, share, rest in outcomes("rejection", p, q, (token,), 1, residuals) if drawn[token] else ():
                weight = float(drawn[token]) * share
                if accepted:
                    found[token] += weight
                else:
                    found = [f + weight * float(r) for f, r in zip(found, rest, strict=True)]
        return found

    assert law(MARGINALS[1]) == pytest.approx([9 / 17, 7 / 17, 1 / 17], abs=1e-12)
    assert law(best) == pytest.approx([437 / 2229, 1792 / 2229, 0], abs=1e-12)
    others = [47744027 / 73929243, 12544 / 37893, 768 / 33167]
    assert law(ROWS[2]) == pytest.approx(others, abs=1e-12)


# ------------------------------------------------------------ trees


def reached(nodes: list[tuple[int, ...]]) -> Fraction:
    """The mean number of nodes that the target's own draws walk through."""
    return sum((product_of([law_of(n[:i])[n[i]] for i in range(len(n))]) for n in nodes), Fraction(0))


def product_of(factors: list[Fraction]) -> Fraction:
    found = Fraction(1)
    for factor in factors:
        found *= factor
    return found


def grown(session, count: int, width: int = 3) -> list[tuple[int, ...]]:
    """The paths to the nodes of the best tree, best first as far as their scores tell."""
    sampler = DraftSampler(
        RULES["greedy"], SamplerConfig(Sampling(0.0), None, 3), Keys(0, torch.zeros(1).long(), torch.ones(1))
    )
    with torch.inference_mode():
        found = grow_dynamic(session, torch.tensor([0]), width, count, 3, sampler).proposal
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


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
    assert set(grown(marginal_session(target), 6, 9)) == {(2,), (0,), (2, 1), (0, 1), (1,), (2, 0)}


def test_a_tree_of_width_one_is_the_chain(target):
    for session in (marginal_session(target), markov_session(target)):
        (path,) = [n for n in grown(session, 3, 1) if len(n) == 3]
        said = [int(drafted_rows(session, path)[i].argmax()) for i in range(3)]
        assert path == tuple(said)


# ------------------------------------------------------------ confidences


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


def told_length(session, path: tuple[int, ...], threshold: float) -> int:
    keys = Keys(0, torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long))
    sampler = Forced(RULES["rejection"], SamplerConfig(Sampling(1.0), None, 3), keys, path=path)
    chain = ChainDraft(sampler, confidence=threshold)
    with torch.inference_mode():
        propose_confidently(session, torch.tensor([0]), len(path), chain, may_sync=False)
    return int(chain.lengths[0])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_chain_that_ends_by_what_stands_before_it_is_lossless(target, residuals, rule):
    """Draft j is proposed if c_1 … c_j reach the threshold; c_j knows the drafts before j."""
    session = confident_session(target, ODDS)
    lengths = {path: told_length(session, path, 0.6) for path in product(range(3), repeat=3)}
    assert set(lengths.values()) == {1, 2, 3}
    law, _ = emitted(session, rule, residuals, length=lengths.get)
    assert distance(law) < 1e-12

    def late(path: tuple[int, ...]) -> int:  # the fault: c_{j + 1} decides about draft j, which it has read
        return max(0, lengths[path] - 1) if lengths[path] < 3 else 3

    law, _ = emitted(session, rule, residuals, length=late)
    assert distance(law) > 0.01


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
    assert law(ours) == pytest.approx([0.7, 0.3])
    searched = {token: best_prefix(r, schedule.costs) for token, r in reach.items()}
    assert searched == {0: 2, 1: 0}
    assert law(searched) == pytest.approx([0.85, 0.15])


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
    prompts = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9)]
    costs = Costs(verify=((0, 1.0), (4, 1.2)), draft=(0.0, 0.1))
    for sampling, verified in ((Sampling(0.0), "auto"), (Sampling(1.0, seed=3), "coupled")):
        chosen = {"confidence": 0.3} if how == "threshold" else {"control": Schedule(costs, rates=(0.5,))}
        plan = Plan(4, verify=verified, **chosen)
        assert Plan.from_dict(plan.to_dict()) == plan
        out = Decoder(target, drafter, static).generate(prompts, 24, sampling, plan, ignore_eos=True)
        expected = Decoder(target).generate(prompts, 24, sampling, Plan(0, verify=verified), ignore_eos=True)
        assert out.tokens == expected.tokens
        assert len({one.drafted for rounds in out.rounds for one in rounds}) > 1
