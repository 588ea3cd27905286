"""Depth control: what it chooses, when it gives up and tries again, and that it never changes the text."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Control, Controller, Costs, Decoder, Plan, Sampling, Schedule, expected_tokens
from outrider.decode.sampling import DraftSampler
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import Target

from .conftest import random_prompts

PROMPTS = random_prompts(5, 1, 9, 3)
CHEAP = Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 0.1, 0.2))
DEAR = Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 2.0, 4.0))


@pytest.fixture
def useless(tiny_llama) -> DraftModel:
    return DraftModel(tiny_llama(layers=1, seed=9))


def controller(
    costs: Costs = CHEAP, rates: tuple[float, ...] = (0.8,) * 6, depths: int = 6, sequences: int = 1
) -> Controller:
    return Controller(Control(costs, rates, weight=4), sequences, range(1, depths + 1), range(1, depths + 1))


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs(verify=((0, 1.0), (4, 2.0), (8, 2.5)), draft=(0.0, 0.3, 0.5), host=0.1)
    assert costs.verify_time(2) == pytest.approx(1.5)
    assert costs.verify_time(100) == pytest.approx(2.5)
    assert costs.draft_time(4) == pytest.approx(0.9), "each further level costs what the last one did"
    assert costs.round_time(2) == pytest.approx(0.5 + 1.5 + 0.1)
    assert costs.round_time(2, nodes=8) == pytest.approx(0.5 + 2.5 + 0.1)


def test_drafting_that_was_measured_at_no_depth_is_free():
    assert Costs(verify=((0, 1.0),)).draft_time(3) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"verify": ()}, "verify needs ascending"),
        ({"verify": ((1, 1.0),)}, "verify needs ascending"),
        ({"verify": ((0, 1.0), (0, 2.0))}, "verify needs ascending"),
        ({"verify": ((0, 0.0),)}, "times must be positive"),
        ({"draft": ()}, "draft begins with the 0 seconds"),
        ({"draft": (0.5,)}, "draft begins with the 0 seconds"),
        ({"draft": (0.0, -0.1)}, "times must be positive"),
        ({"host": -0.1}, "times must be positive"),
    ],
)
def test_costs_that_make_no_sense_are_refused(values, message):
    with pytest.raises(BadInputError, match=f"costs: {message}"):
        Costs(**{"verify": ((0, 1.0),)} | values)


def test_a_rate_may_be_certain_and_a_weight_less_than_a_round():
    assert Control(CHEAP, (0.0, 1.0), weight=0.5).weight == 0.5
    assert Control(CHEAP, (0.0, 1.0)).weight == 8


@pytest.mark.parametrize("arguments", [{"rates": ()}, {"rates": (1.2,)}, {"rates": (0.5,), "weight": 0.0}])
def test_controls_that_make_no_sense_are_refused(arguments):
    with pytest.raises(BadInputError, match="control"):
        Control(CHEAP, **arguments)


@pytest.mark.parametrize("control", [Control(CHEAP, (0.5, 0.4)), Schedule(CHEAP, (0.5, 0.25), weight=3.0)])
def test_a_plan_with_control_survives_json(control):
    plan = Plan(6, confidence=0.2, control=control)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert type(again.control) is type(control)
    assert str(plan) == "depth up to 6"


def test_a_schedule_takes_drafts_by_their_promise_until_one_does_not_raise_the_speed():
    """Of 2 rows × 3 drafts. A pass takes 1 + 0.2 m seconds for m drafts per row, drafting 0.5."""
    schedule = Schedule(Costs(((0, 1.0), (3, 1.6)), (0.0, 0.5, 0.5, 0.5)), (0.5,))
    reach = torch.tensor([[0.9, 0.2, 0.1], [0.8, 0.7, 0.05]])
    # By promise: 0.9, 0.8, 0.7 | 0.2, 0.1, 0.05; tokens after m of them, over the seconds of the round:
    tokens = [2, 2.9, 3.7, 4.4, 4.6, 4.7, 4.75]
    speeds = [t / (1.5 + 0.1 * m) for m, t in enumerate(tokens)]
    assert speeds[:4] == sorted(speeds[:4])
    assert speeds[4] < speeds[3]
    for _ in range(2):  # the second time with what the first one made
        assert schedule.lengths(reach).tolist() == [1, 2]
    assert schedule.lengths(reach[:1]).tolist() == [1]
    assert schedule.lengths(reach.flip(0)).tolist() == [2, 1]


def test_a_schedule_knows_costs_by_the_shape_of_the_batch():
    """Beside one row of two drafts a round of four has other seconds."""
    schedule = Schedule(Costs(((0, 1.0), (1, 1.0), (4, 9.0))), (0.5,))
    assert schedule.lengths(torch.tensor([[0.9, 0.8]])).tolist() == [1]
    assert schedule.lengths(torch.full((4, 1), 0.5)).tolist() == [1, 1, 1, 1]
    assert schedule.lengths(torch.tensor([[0.9, 0.8, 0.7]])).tolist() == [1]


def test_expected_tokens_is_the_closed_form_of_a_constant_rate():
    assert expected_tokens([0.7] * 4) == pytest.approx((1 - 0.7**5) / (1 - 0.7))


def expected_rates(prior: list[float], weight: float, rounds: list[tuple[int, int]]) -> list[float]:
    """The rates of a sequence by hand.

    A round tells of the drafts that it kept and of the first that it refused, of none after that.
    """
    reached, kept = [0.0] * len(prior), [0.0] * len(prior)
    for tried, accepted in rounds:
        reached = [0.95 * n + (depth <= accepted and depth < tried) for depth, n in enumerate(reached)]
        kept = [0.95 * n + (depth < accepted) for depth, n in enumerate(kept)]
    promised = sum(n * p for n, p in zip(reached, prior, strict=True)) / sum(reached)
    found = (weight * promised + sum(kept)) / (weight + sum(reached))
    found, promised = (min(max(rate, 0.02), 0.98) for rate in (found, promised))
    odds = [found / (1 - found) / (promised / (1 - promised)) * p / (1 - p) for p in prior]
    return [(weight * o / (1 + o) + k) / (weight + n) for o, k, n in zip(odds, kept, reached, strict=True)]


ROUNDS = {
    "refused at once": [(3, 0)],
    "refused at the second": [(3, 1)],
    "all kept": [(3, 3), (3, 3)],
    "a shorter one": [(3, 2), (2, 2)],
    "a single draft": [(1, 1)],
}


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
def test_rates_follow_what_each_depth_showed(rounds):
    one = controller(rates=(0.6, 0.8, 0.3), depths=3)
    for tried, accepted in rounds:
        one.note(0, tried, accepted)
    assert one.rates([0])[0].tolist() == pytest.approx(expected_rates([0.6, 0.8, 0.3], 4, rounds))


def test_drafts_after_the_first_refused_one_say_nothing():
    """Of six drafts the first was refused: the others count as never tried."""
    long, short = controller(), controller()
    long.note(0, 6, 0)
    short.note(0, 1, 0)
    assert long.rates([0]).tolist() == short.rates([0]).tolist()


def test_each_sequence_has_rates_of_its_own():
    one = controller(rates=(0.6, 0.8, 0.3), depths=3, sequences=3)
    shown = {0: [(3, 3)], 2: [(3, 0), (3, 1)]}
    for row, rounds in shown.items():
        for tried, accepted in rounds:
            one.note(row, tried, accepted)
    first, untried, last = one.rates([0, 1, 2]).tolist()
    assert first == pytest.approx(expected_rates([0.6, 0.8, 0.3], 4, shown[0]))
    assert untried == pytest.approx([0.6, 0.8, 0.3])
    assert last == pytest.approx(expected_rates([0.6, 0.8, 0.3], 4, shown[2]))


@pytest.mark.parametrize(
    ("told", "taken", "accepted"), [(0.0, 0.02, 0), (0.0, 0.02, 1), (1.0, 0.98, 0), (1.0, 0.98, 1)]
)
def test_nothing_is_taken_for_certain(told, taken, accepted):
    """Rates stay within 2% and 98%, as promised and as found, so that their odds stay finite."""
    one = controller(rates=(told,), depths=1)
    for _ in range(30):
        one.note(0, 1, accepted)
    assert one.rates([0])[0].tolist() == pytest.approx(expected_rates([taken], 4, [(1, accepted)] * 30))


def test_depths_that_nothing_was_promised_for_are_as_good_as_the_last_one():
    assert controller(rates=(0.5, 0.9), depths=4).rates([0])[0].tolist() == pytest.approx([0.5, 0.9, 0.9, 0.9])
    assert controller(rates=(0.5, 0.9), depths=1).rates([0])[0].tolist() == pytest.approx([0.5])


def test_goodput_is_expected_tokens_per_second_of_a_round_with_all_its_nodes():
    costs = Costs(verify=((0, 1.0), (8, 2.0)), draft=(0.0, 0.1, 0.2), host=0.05)
    tree = Controller(Control(costs, (0.5,) * 2), 1, [2], [6])
    assert tree.goodput([0]).tolist() == pytest.approx([1 / 1.05, 1.75 / (0.2 + 1.75 + 0.05)])


def test_every_depth_needs_its_number_of_nodes():
    with pytest.raises(ValueError, match="zip"):
        Controller(Control(CHEAP, (0.5,)), 1, [1, 2], [1])


def by_hand(costs: Costs, rate: float, depths: int) -> int:
    return max(range(depths + 1), key=lambda d: expected_tokens([rate] * d) / costs.round_time(d))


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_the_first_depth_maximises_expected_tokens_per_second(costs, rate):
    assert controller(costs, (rate,) * 6).choose([0]) == by_hand(costs, rate, 6)


def test_depth_follows_what_a_sequence_shows():
    one = controller()
    first = one.choose([0])
    for _ in range(20):
        depth = one.choose([0])
        one.note(0, depth, min(depth, 1))
    assert 1 <= one.choose([0]) < first
    for _ in range(40):
        depth = one.choose([0])
        one.note(0, depth, depth)
    assert one.choose([0]) == 6


def test_a_sequence_that_accepts_nothing_is_decoded_plainly_and_tried_again_ever_more_rarely():
    one, depths = controller(), []
    for _ in range(400):
        depths.append(one.choose([0]))
        one.note(0, depths[-1], 0)
    stopped = depths.index(0)
    assert stopped <= 30
    tries = [i for i, d in enumerate(depths) if d and i > stopped]
    waits = [b - a for a, b in zip([stopped - 1, *tries], tries, strict=False)]
    assert waits[:4] == [9, 17, 33, 65]
    assert waits[-1] == 65, "and never rarer than that"


def test_drafting_that_pays_again_is_taken_up_again():
    one = controller()
    for _ in range(60):
        one.note(0, one.choose([0]), 0)
    depths = []
    for _ in range(200):
        depths.append(one.choose([0]))
        one.note(0, depths[-1], depths[-1])
    assert depths[0] == 0
    assert min(depths[-20:]) >= 4


def test_a_gain_within_the_noise_changes_nothing():
    """At equal goodput the depth stays; it moves once another is clearly better."""
    one = controller()
    before = one.choose([0])
    for _ in range(3):
        one.note(0, before, min(before, 4))
        assert one.choose([0]) == before


def gaining(gain: float, rate: float = 0.5) -> Costs:
    """The costs at which a single draft of this rate brings `gain` times the tokens per second of plain decoding."""
    return Costs(verify=((0, 1.0),), draft=(0.0, (1 + rate) / gain - 1))


def test_drafting_begins_for_more_than_the_noise_only():
    assert controller(gaining(1.02), (0.5,), depths=1).choose([0]) == 0
    assert controller(gaining(1.04), (0.5,), depths=1).choose([0]) == 1


def test_drafting_goes_on_while_it_is_no_loss():
    one = controller(gaining(1.02), (0.5,), depths=1, sequences=2)
    one.note(0, 1, 1)
    assert one.choose([0]) == 1, "a sequence that does well begins"
    assert one.choose([1]) == 1, "and one that gains 2% goes on with it"


def test_a_try_that_gains_no_more_than_the_noise_is_a_failure():
    one = controller(gaining(1.02), (0.5,), depths=1)
    assert [one.choose([0]) for _ in range(27)] == [0] * 8 + [1] + [0] * 16 + [1] + [0]


def test_after_a_try_that_succeeded_drafting_goes_on_while_it_is_no_loss():
    one = controller(gaining(1.02), (0.5,), depths=1, sequences=2)
    assert [one.choose([1]) for _ in range(9)] == [0] * 8 + [1]
    one.note(0, 1, 1)
    assert one.choose([0]) == 1, "a sequence that does well makes it a success"
    assert one.choose([1]) == 1


def test_rows_of_a_batch_share_the_depth_that_is_best_for_their_sum():
    one = controller(Costs(verify=((0, 1.0), (8, 1.1)), draft=(0.0, 0.6)), sequences=3)
    for _ in range(40):
        one.note(0, 6, 6)
        one.note(1, 6, 6)
        one.note(2, 6, 0)
    best = [int(one.depths[one.goodput(rows).argmax()]) for rows in ([0], [2], [0, 1, 2], [0, 2])]
    assert best == [6, 0, 6, 0], "two that gain by 6 drafts outweigh one that does not, one does not"


def test_a_drafter_measured_as_useless_is_not_drafted_with_at_first():
    assert controller(rates=(0.0,) * 6).choose([0]) == 0


def drafters(target: Target, itself: DraftModel, useless: DraftModel) -> dict[str, Drafter]:
    torch.manual_seed(0)
    return {
        "itself": itself,
        "useless": useless,
        "eagle3": Eagle3.build(Eagle3Config(taps=(1, 2, 3)), target),
        "ngram": Ngram(),
    }


PLANS = {
    "chain": Plan(5, control=Control(CHEAP, (0.7,) * 5)),
    "chain, confidence": Plan(5, confidence=0.3, control=Control(CHEAP, (0.7,) * 5)),
    "dynamic tree": Plan(3, width=3, nodes=6, control=Control(CHEAP, (0.7,) * 3)),
    "confidence": Plan(5, confidence=0.3),
}


@pytest.mark.parametrize("name", PLANS)
def test_control_never_changes_the_text(target, itself, useless, name):
    greedy = Decoder(target).generate(PROMPTS, 40).tokens
    sampling = Sampling(1.0, top_p=0.9, seed=3)
    coupled = Decoder(target).generate(PROMPTS, 40, sampling, Plan(verify="coupled")).tokens
    for kind, drafter in drafters(target, itself, useless).items():
        plan = PLANS[name] if drafter.abilities.reads_nodes else PLANS[name].chain
        decoder = Decoder(target, drafter)
        assert decoder.generate(PROMPTS, 40, plan=plan).tokens == greedy, kind
        assert [decoder.generate([p], 40, plan=plan).tokens[0] for p in PROMPTS] == greedy, f"{kind}, one by one"
        values = plan.to_dict() | {"verify": "coupled"}
        assert decoder.generate(PROMPTS, 40, sampling, Plan.from_dict(values)).tokens == coupled, f"{kind}, coupled"


def test_a_useless_drafter_soon_costs_nothing(target, useless):
    out = Decoder(target, useless).generate(PROMPTS[:1], 200, plan=PLANS["chain"])
    drafted = [r.drafted for r in out.rounds[0]]
    assert drafted[0] > 0
    assert sum(d > 0 for d in drafted[20:]) <= 6
    assert 0 in drafted[:20], "though much better was promised"


def test_every_draft_is_still_right_after_plain_rounds(target, itself):
    """A controller that expects nothing begins plainly, tries, finds everything right, and goes as deep as it may."""
    out = Decoder(target, itself).generate(PROMPTS, 120, plan=Plan(5, control=Control(CHEAP, (0.0,) * 5)))
    for rounds in out.rounds:
        assert [r.drafted for r in rounds[:8]] == [0] * 8
        assert rounds[-1].drafted == 5
        assert all(r.accepted == r.drafted for r in rounds)


def test_a_chain_ends_after_the_first_uncertain_token_not_before_it(target, tiny_llama, monkeypatch):
    """Every token but the last of a round was certain; the last was not, or the chain was full. All were verified."""
    drafter, threshold = DraftModel(tiny_llama(layers=4, seed=0, initializer_range=0.3)), 0.1
    seen: list[list[float]] = []

    honest = DraftSampler.next_token

    def noting(sampler, logits, token_ids, depth, context):
        picked = honest(sampler, logits, token_ids, depth, context)
        if not depth:
            seen.append([])
        seen[-1].append(float(picked.probability()))
        return picked

    monkeypatch.setattr(DraftSampler, "next_token", noting)
    out = Decoder(target, drafter).generate(PROMPTS[:1], 80, plan=Plan(4, confidence=threshold))
    assert [r.drafted for r in out.rounds[0]] == [len(row) for row in seen]
    assert all(p >= threshold for row in seen for p in row[:-1])
    assert all(len(row) == 4 or row[-1] < threshold for row in seen)
    assert len({len(row) for row in seen}) > 1


def test_rows_of_a_batch_end_their_chains_each_where_it_is_uncertain(target, tiny_llama):
    decoder = Decoder(target, DraftModel(tiny_llama(layers=4, seed=0, initializer_range=0.3)))
    plan = Plan(4, confidence=0.1)
    together = decoder.generate(PROMPTS, 40, plan=plan)
    for rounds, prompt in zip(together.rounds, PROMPTS, strict=True):
        alone = decoder.generate([prompt], 40, plan=plan).rounds[0]
        assert [(r.drafted, r.accepted) for r in rounds] == [(r.drafted, r.accepted) for r in alone]


def test_at_the_threshold_of_one_a_chain_is_one_draft(target, useless):
    out = Decoder(target, useless).generate(PROMPTS, 30, Sampling(1.0), Plan(4, confidence=1.0))
    assert {r.drafted for rounds in out.rounds for r in rounds} == {1}


@pytest.mark.parametrize("plan", [Plan(3), Plan(3, width=2, nodes=4), PLANS["chain"]], ids=str)
def test_speculation_can_be_switched_off_per_request(target, itself, plan):
    decoder = Decoder(target, itself)
    expected = Decoder(target).generate(PROMPTS, 30).tokens
    out = decoder.generate(PROMPTS, 30, plan=plan, speculate=[True, False, True, False])
    assert out.tokens == expected
    for i, rounds in enumerate(out.rounds):
        assert (sum(r.drafted for r in rounds) > 0) is (i % 2 == 0)
        assert i % 2 == 0 or all(r.emitted == 1 for r in rounds)
    off = decoder.generate(PROMPTS, 30, plan=plan, speculate=False)
    assert off.tokens == expected
    assert off.rule == "none"


def test_switched_off_rows_that_outlive_the_others_are_decoded_plainly(target, itself):
    """The row that drafts ends first, and the rest drafts nothing."""
    decoder = Decoder(target, itself)
    out = decoder.generate(PROMPTS, 40, plan=Plan(3), speculate=[False, True, False, False])
    assert out.tokens == Decoder(target).generate(PROMPTS, 40).tokens
    assert all(r.accepted == r.drafted for r in out.rounds[1])


def test_as_many_switches_as_prompts(target, itself):
    with pytest.raises(BadInputError, match="4 prompts, but 2 flags"):
        Decoder(target, itself).generate(PROMPTS, 5, speculate=[True, False])
