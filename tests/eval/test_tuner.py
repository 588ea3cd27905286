"""A whole tuning: what is tried, what is said, and what is refused before any work."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from outrider.eval import prediction, tuner
from outrider.eval.suites import Suite
from outrider.eval.tuner import tune
from outrider.eval.tuning import Tuning
from outrider.ground import BadInputError
from outrider.heads import DraftModel, Ngram
from outrider.heads.draft_model import DraftModelSession
from outrider.recipes import EvalSpec
from outrider.targets import Target


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2))


@pytest.fixture
def settings() -> EvalSpec:
    return EvalSpec(max_new_tokens=12, repeats=1, temperatures=[0.0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sizes: what is measured is not the point."""
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 2, 4, 8, 16))
<<<<<<< HEAD
    monkeypatch.setattr(prediction, "TREE_SIZES", (4, 8))
=======
    monkeypatch.setattr(tuner, "TREE_SIZES", (4, 8))


# ------------------------------------------------------------ predictions


def test_predicted_tokens_per_second_by_hand() -> None:
    """2 rows of 11 tokens, 10 of them in 4 rounds each; rows run in 80% of the rounds, so these are 5: 0.5 s + 5 · 0.1 s for 22 tokens."""
    assert tuner.tokens_per_second(
        2.5, Loop(prefill=0.5, seconds=0.1, running=0.8), tokens=11, batch=2
    ) == pytest.approx(22.0)


def test_a_chains_tokens_by_hand() -> None:
    """Of a drafter that finds nothing in half of the rounds: alpha says nothing of that, what was kept does."""
    assert Acceptance((0.5, 0.5, 0.0), (0.25, 0.125, 0.0), (), 10).chain(2) == 1.375


def test_what_rounds_take_is_read_off_whole_batches() -> None:
    """3 rounds for the first row and 1 for the second are 3 passes, 4 of 6 row-rounds; the median of batches."""
    rounds = [[Round(1, 0, 1)] * 3, [Round(1, 0, 1)]]
    done = [Completion([[1] * 4, [1] * 2], rounds, 1.0, seconds) for seconds in (1.3, 1.6, 9.0)]
    assert tuner.loop_of(done) == Loop(1.0, pytest.approx(0.2), pytest.approx(4 / 6))


def test_costs_add_up_to_the_rounds_that_were_timed() -> None:
    loops = {0: Loop(0, 0.012), 1: Loop(0, 0.016), 4: Loop(0, 0.028)}
    costs = tuner.costs_in_loop(CURVE, loops)
    assert costs.host == pytest.approx(0.002)
    assert [costs.round_time(d) for d in (0, 1, 4)] == pytest.approx([0.012, 0.016, 0.028])
    assert costs.round_time(2) == pytest.approx(0.020)
    assert costs.verify_time(64) == pytest.approx(0.074)


def test_rounds_that_are_faster_than_a_pass_by_itself_keep_its_growth() -> None:
    """As with captured graphs, where a pass by itself waits for the host."""
    costs = tuner.costs_in_loop(CURVE, {0: Loop(0, 0.004), 1: Loop(0, 0.006)})
    assert costs.host == 0
    assert [costs.round_time(0), costs.round_time(1)] == pytest.approx([0.004, 0.006])
    assert costs.verify_time(64) == pytest.approx(0.004 + 0.064)


def test_noise_does_not_make_more_work_cheaper() -> None:
    costs = tuner.costs_in_loop(
        {0: 0.010, 1: 0.014, 2: 0.012, 8: 0.020}, {0: Loop(0, 0.010), 1: Loop(0, 0.020), 2: Loop(0, 0.018)}
    )
    assert costs.verify_time(1) == costs.verify_time(2) == pytest.approx(0.013)
    assert costs.round_time(1) == pytest.approx(costs.round_time(2)) == pytest.approx(0.019)


def predicted(draft: float, alpha: float, wide: float, ranks: tuple[tuple[float, ...], ...] = ()) -> list[Option]:
    """Options, best first, where plain rounds take 10 ms, a level `draft` more, and a pass `wide` more per draft."""
    curve = {n: 0.010 + wide * n for n in (0, 1, 8, 64)}
    loops = {d: Loop(0, 0.010 + (draft + wide) * d) for d in (0, 1, 2, 4, 8)}
    seen = Acceptance((alpha,) * 8, tuple(alpha**d for d in range(1, 9)), ranks, 100)
    costs = tuner.costs_in_loop(curve, loops)
    chains = tuner.chain_options(costs, loops, seen, 1)
    trees = [tuner._cheap_option(costs, chains, tree, seen, 1) for tree in tuner.hopeful_trees(costs, chains, seen, 1)]
    return tuner.best([*chains, *trees], 99)


RANKS = ((0.5, 0.2, 0.1, 0.05),) * 4


@pytest.mark.parametrize(
    ("draft", "alpha", "wide", "expected"),
    [(0.012, 0.6, 0.0005, 0), (0.0001, 0.95, 0.0001, 8), (0.001, 0.5, 0.0001, 2)],
)
def test_expensive_drafts_are_left_out_and_cheap_good_ones_go_deep(
    draft: float, alpha: float, wide: float, expected: int
) -> None:
    assert predicted(draft, alpha, wide)[0].plan == Plan(expected)


def test_where_width_is_free_a_tree_wins_and_where_it_is_not_no_tree_is_even_timed() -> None:
    first = predicted(0.001, 0.5, 1e-6, RANKS)[0]
    assert first.plan.tree is not None
    assert first.tau == pytest.approx(first.plan.tree.value(RANKS))
    assert not any(o.plan.is_tree for o in predicted(0.001, 0.5, 0.005, RANKS))


def test_the_controlled_chain_may_go_a_little_deeper_than_the_best() -> None:
    seen, costs = Acceptance((0.5,) * 8, (), (), 100), Costs(((0, 0.01),))
    options = [Option(Plan(d), 1.5, Loop(0, 0.01), speed) for d, speed in ((1, 50.0), (3, 80.0), (7, 60.0))]
    found = tuner.control_option(options, costs, seen, 8)
    assert (found.plan.depth, found.predicted) == (5, 80.0)
    assert found.plan.control == Control(costs, seen.rates, 16.0)
    assert tuner.control_option(options[2:], costs, seen, 8).plan.depth == 8
    assert tuner.control_option(options[:2], costs, seen, 4).plan.depth == 4


# ------------------------------------------------------------ acceptance


def test_shares_by_rank_by_hand() -> None:
    """Nodes 0 1 2 behind the root, 3 4 5 behind node 0. Ten rounds: 2 kept nothing, 2 ended at 1, 1 at 0, 3 at 3, 2 at 5."""
    tree = acceptance.wide_tree(2, 3)
    assert tree == Tree((-1, -1, -1, 0, 0, 0))
    ends = [-1, -1, 1, 1, 0, 3, 3, 3, 5, 5]
    assert acceptance._share_by_rank(tree, ends, 0) == (0.6, 0.2, 0.0)
    assert acceptance._share_by_rank(tree, ends, 1) == (0.5, 0.0, pytest.approx(2 / 6, abs=1e-6))
    assert acceptance._share_by_rank(tree, [-1], 1) == (0.0, 0.0, 0.0)


class SecondBest(DraftModel):
    """The target itself, its two most probable tokens in each other's place."""

    def open(self, *arguments: Any) -> SwappedSession:
        honest = super().open(*arguments)
        return SwappedSession(honest.runner, honest.cache, honest.fused, honest.output_ids, honest.vocab)


class SwappedSession(DraftModelSession):
    def begin(self, root: Tensor) -> Tensor:
        return self._swapped(super().begin(root))

    def extend(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self._swapped(super().extend(tokens, parents))

    @staticmethod
    def _swapped(logits: Tensor) -> Tensor:
        top = logits.topk(2)
        return logits.scatter(-1, top.indices, top.values.flip(-1))


def test_the_rank_is_that_of_the_child_that_was_kept(target: Target, suites: list[Suite]) -> None:
    jobs = make_jobs(suites)
    right = acceptance.rank_rates(target, DraftModel(target.model), jobs, 12, Sampling())
    assert right == ((1.0, *[0.0] * 5),) * 6
    second = acceptance.rank_rates(target, SecondBest(target.model), jobs, 12, Sampling())
    assert second[0] == (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rates_of_a_tree_give_the_tau_it_was_measured_with(
    target: Target, suites: list[Suite], tiny_llama, temperature: float
) -> None:
    """An identity: of that very tree, in that very run. The tokens that cut an answer off are still counted as accepted."""
    drafter, jobs, sampling = (
        DraftModel(tiny_llama(layers=1, initializer_range=0.1)),
        make_jobs(suites),
        Sampling(temperature=temperature),
    )
    ranks = acceptance.rank_rates(target, drafter, jobs, 40, sampling)
    tree = acceptance.wide_tree(6, 6)
    rounds = []
    for some in acceptance._pieces(jobs):
        out = Decoder(target, drafter).generate(
            [j.prompt.tokens for j in some], 40, sampling, Plan(tree=tree), sequence_ids=[j.sequence for j in some]
        )
        rounds += [r for sequence in out.rounds for r in sequence]
    assert 1 < (tau := 1 + sum(r.accepted for r in rounds) / len(rounds)) < 6
    assert tree.value(ranks) == pytest.approx(tau, abs=1e-4)


def test_acceptance_of_chains(target: Target, suites: list[Suite]) -> None:
    seen = acceptance.measure_acceptance(
        target, DraftModel(target.model), make_jobs(suites), 19, Sampling(), trees=False
    )
    assert seen == Acceptance((1.0,) * 8, (1.0,) * 8, (), 19)


def test_the_deepest_chain_is_predicted_as_it_was_measured(target: Target, suites: list[Suite]) -> None:
    """Also of a drafter that often finds nothing to draft."""
    jobs = make_jobs(suites)
    seen = acceptance.measure_acceptance(target, Ngram(), jobs, 40, Sampling(), trees=False)
    out = [Decoder(target, Ngram()).generate([j.prompt.tokens], 40, plan=Plan(8)) for j in jobs]
    rounds = [r for o in out for r in o.rounds[0]]
    assert any(r.drafted == 0 for r in rounds)
    assert seen.chain(8) == pytest.approx(1 + sum(r.accepted for r in rounds) / len(rounds))
    assert seen.rates[0] == pytest.approx(
        sum(r.accepted > 0 for r in rounds) / sum(r.drafted > 0 for r in rounds), abs=1e-6
    )


class Shallow(DraftModel):
    @property
    def max_depth(self) -> int:
        return 3


@pytest.mark.usefixtures("quick")
def test_nothing_deeper_than_the_drafter_drafts_is_tried(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    (batch,) = tune(target, Shallow(target.model), suites, settings).batches
    assert len(batch.rates) == len(batch.ranks) == 3
    assert max(c.restored(batch.costs, batch.rates).depth for c in batch.candidates) == 3


# ------------------------------------------------------------ the choice


BOOTSTRAP = Bootstrap([6])


def raced(plan: Plan, seconds: float, noise: float = 0.0) -> Measured:
    """Six batches of 100 tokens in about `seconds` each."""
    times = [seconds * (1 + noise * (-1) ** i) for i in range(6)]
    plain = Ratio([100] * 6, [1.0] * 6)
    return Measured(Option(plan, 2.0, Loop(0, 0.01), 100 / seconds), 2.0, Ratio([100] * 6, times), plain, BOOTSTRAP)


PLAIN, CHAIN, SHALLOW = raced(Plan(0), 1.0), raced(Plan(4), 0.6), raced(Plan(1), 0.8)
TREE = Plan(tree=Tree((-1, -1, 0)))
CONTROLLED = Plan(6, control=Control(Costs(((0, 0.01),)), (0.5,)))


@pytest.mark.parametrize(
    ("fixed", "controlled", "expected", "words"),
    [
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.5), CONTROLLED, "falls back"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.61, noise=0.3), CONTROLLED, "within the noise"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.7), Plan(4), "0.86× [0.86, 0.86] the speed of depth 4"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.55), TREE, "The fastest"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.45), CONTROLLED, "The fastest"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 1.02), Plan(0), "Nothing is faster than the plain target"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 0.98), CONTROLLED, "falls back"),
        (
            [raced(Plan(1), 0.97)],
            raced(CONTROLLED, 1.02, noise=0.3),
            Plan(1),
            "is slower than the plain target, this one is not",
        ),
    ],
)
def test_the_best_measured_plan_is_chosen(
    fixed: list[Measured], controlled: Measured, expected: Plan, words: str
) -> None:
    chosen, reason = tuner.choose([PLAIN, *fixed, controlled])
    assert chosen.option.plan == expected
    assert words in reason


def test_speed_and_speedup_are_those_of_the_median_repeat() -> None:
    options = [Option(Plan(d), 2.0, Loop(0, 0.01), 1.0) for d in (0, 2)]
    rounds = [[Round(2, 1, 2), Round(2, 2, 3)]]
    runs = {
        "plain": [[Completion([[1] * 6], [[Round(0, 0, 1)] * 5], 0.0, t) for t in (2.0, 2.5, 9.0)]] * 4,
        "depth 2": [[Completion([[1] * 6], rounds, 0.0, t) for t in (1.0, 0.5, 7.0)]] * 4,
    }
    plain, drafted = tuner.measured_options(options, runs, Bootstrap([4]))
    assert plain.figures()["speedup"] == 1.0
    assert drafted.figures() == {"tau": 2.5, "tokens_per_second": 6.0, "speedup": 2.5, "low": 2.5, "high": 2.5}


# ------------------------------------------------------------ the whole
>>>>>>> sessions


@pytest.mark.usefixtures("quick")
def test_a_whole_tuning(target: Target, suites: list[Suite], settings: EvalSpec) -> None:
    """A drafter equal to the target, at two batch sizes: everything is accepted.

    The record says what was found under which conditions.
    """
    text = io.StringIO()
    found = tune(target, DraftModel(target.model), suites, settings, [2, 1, 2], Console(file=text, width=120))
    assert [b.batch_size for b in found.batches] == [1, 2]
    assert (found.num_prompts, found.temperature, found.drafter, found.dtype) == (5, 0.0, "draft_model", "float32")
    assert found.suites == {s.name: s.digest for s in suites}
    for batch in found.batches:
        measured = [c for c in batch.candidates if c.tokens_per_second is not None]
        assert measured[0].plan == {"depth": 0}
        assert (measured[0].tau, measured[0].speedup, measured[-1].weight) == (1.0, 1.0, 16.0)
        chains = {c.plan["depth"]: c for c in batch.candidates if "tree" not in c.plan and c.weight is None}
        assert [chains[d].predicted_tau for d in range(9)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert batch.chosen in measured
        assert batch.context == 4 + 6
        assert f"batch {batch.batch_size}, passes after 10 tokens" in text.getvalue()
        assert batch.plan == batch.chosen.restored(batch.costs, batch.rates)
    assert text.getvalue().count("chosen: ") == 2
    assert Tuning.model_validate(json.loads(found.model_dump_json())) == found


@pytest.mark.usefixtures("quick")
def test_a_drafter_that_grows_no_trees_gets_chains_and_says_so(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    text = io.StringIO()
    (batch,) = tune(target, Ngram(), suites, settings, console=Console(file=text, width=120)).batches
    assert batch.ranks == []
    assert not any("tree" in c.plan for c in batch.candidates)
    assert "no trees: ngram drafts chains only." in text.getvalue()


@pytest.mark.usefixtures("quick")
def test_passes_stay_inside_the_targets_context(tiny_llama, suites: list[Suite], settings: EvalSpec) -> None:
    small = Target(tiny_llama(layers=2, max_position_embeddings=20))
    (batch,) = tune(small, Ngram(), suites, settings).batches
    assert batch.costs.widths == [0, 1, 2, 4, 8]


class Shallow(DraftModel):
    @property
    def max_depth(self) -> int:
        return 3


@pytest.mark.usefixtures("quick")
def test_nothing_deeper_than_the_drafter_drafts_is_tried(
    target: Target, suites: list[Suite], settings: EvalSpec
) -> None:
    (batch,) = tune(target, Shallow(target.model), suites, settings).batches
    assert len(batch.rates) == len(batch.ranks) == 3
    assert max(c.restored(batch.costs, batch.rates).depth for c in batch.candidates) == 3


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"temperatures": [0.0, 1.0]}, [1], r"one temperature at a time; got 0\.0, 1\.0"),
        ({}, [6], r"between 1 and the number of prompts, 5; got 6\. Take more prompts"),
        ({}, [1, 0], "got 1, 0"),
        ({}, [], "got none"),
        ({"max_new_tokens": 600}, [1], "exceeds the target's context of 512"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    target: Target, suites: list[Suite], settings: EvalSpec, changes: dict[str, Any], sizes: list[int], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        tune(target, Ngram(), suites, settings.model_copy(update=changes), sizes)


def test_no_prompts_is_bad_input(target: Target, settings: EvalSpec) -> None:
    with pytest.raises(BadInputError, match="no prompts to tune on"):
        tune(target, Ngram(), [], settings)


def test_answers_that_end_at_once_leave_nothing_to_tune(
    target: Target, suites: list[Suite], settings: EvalSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "eos_ids", property(lambda _: tuple(range(64))))
    with pytest.raises(BadInputError, match="every answer ended with its first token"):
        tune(target, Ngram(), suites, settings)
