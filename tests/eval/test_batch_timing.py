"""Which batches of prompts are run, what is counted, and what is drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Round
from outrider.distill.prompt_table import Prompt
from outrider.eval import Interval
from outrider.eval.batch_timing import BatchAnswer, batch_figures, make_groups, measure_batches
from outrider.eval.reports.figures import BatchFigures
from outrider.eval.reports.plots import speedup_by_batch, standalone
from outrider.eval.suites import PromptJob
from outrider.heads import DraftModel
from outrider.recipes import EvalSpec
from outrider.targets import Target


@pytest.fixture
def jobs() -> list[PromptJob]:
    """Ten ragged prompts over a vocabulary of 64."""
    return [
        PromptJob("code", Prompt(f"p{i}", "code", tuple((7 * i + 3 * j) % 64 for j in range(3 + i % 4))), i)
        for i in range(10)
    ]


def test_batches_of_one_pass_share_no_prompt_and_all_are_full(jobs):
    groups = make_groups(jobs, 3, least=1)
    assert [len(g) for g in groups] == [3, 3, 3]
    used = [job.sequence for group in groups for job in group]
    assert len(set(used)) == 9


def test_where_prompts_fill_too_few_batches_they_are_drawn_again(jobs):
    groups = make_groups(jobs, 4, least=5)
    assert [len(g) for g in groups] == [4] * 5
    assert len({tuple(sorted(job.sequence for job in g)) for g in groups}) == 5
    assert [[j.sequence for j in g] for g in make_groups(jobs, 4, least=5)] == [[j.sequence for j in g] for g in groups]
    assert len(make_groups(jobs, 1, least=2)) == 10


def test_sizes_without_a_full_batch_are_refused(jobs):
    for size in (0, 11):
        with pytest.raises(BadInputError, match=f"between 1 and the number of prompts, 10; got {size}"):
            make_groups(jobs, size, 1)


def test_a_whole_measurement(tiny_llama, jobs):
    """The target as its own drafter keeps everything and writes the plain text; rows leave as they end."""
    target = Target(tiny_llama(layers=2, eos_token_id=5))
    own = Decoder(target, DraftModel(target.model))
    decoders = [("plain", Decoder(target), Plan(0)), ("self", own, Plan(2))]
    ticks: list[None] = []
    settings = EvalSpec(max_new_tokens=12, repeats=1, batch_sizes=[1, 4])
    points = measure_batches(decoders, jobs, settings, 0.0, 3, lambda: ticks.append(None))
    assert [(p.contestant, p.size) for p in points] == [("plain", 1), ("self", 1), ("plain", 4), ("self", 4)]
    assert [(p.groups, p.sequences) for p in points[1::2]] == [(10, 10), (3, 12)]
    assert len(ticks) == 2 * 13
    for plain, own in zip(points[::2], points[1::2], strict=True):
        assert (plain.speedup.value, plain.tau) == (1.0, None)
        assert own.identical == own.sequences
        assert own.tokens == plain.tokens
        assert own.tau.value > 2  # 3, but for the rounds that an end token cuts
    assert points[0].rows == 1.0
    assert 1.0 < points[2].rows <= 4.0
    assert points[3].speedup.known


def test_figures_by_hand():
    """Two batches of two: 8 tokens in 2 s and 4 in 2 s, beside the plain target's in 4 s each."""
    none, one = Round(1, 0, 1), Round(1, 1, 2)
    own = [
        BatchAnswer([[1] * 5, [1] * 3], [[one, one], [one]], 0.1, 2.0),
        BatchAnswer([[1] * 2, [2] * 2], [[none], [none]], 0.1, 2.0),
    ]
    base = [
        BatchAnswer([[1] * 5, [1] * 3], [[none] * 4, [none] * 2], 0.1, 4.0),
        BatchAnswer([[1] * 2, [1] * 2], [[none], [none]], 0.1, 4.0),
    ]
    point = batch_figures("own", "plain", 2, 0.0, {"own": own, "plain": base}, [0, 1])
    assert point.tokens_per_second.value == 3.0
    assert point.speedup.value == 2.0
    assert point.tau.value == 1 + 3 / 5
    assert point.rows == round(5 / 3, 2)
    assert (point.tokens, point.sequences, point.identical) == (12, 4, 3)
    assert batch_figures("plain", "plain", 2, 0.0, {"own": own, "plain": base}, [0, 1]).tau is None
    together = batch_figures("own", "plain", 2, 0.0, {"own": own, "plain": base}, [0, 1], apart=False)
    assert (together.tau.value, together.tau.known) == (point.tau.value, False)  # the same prompts twice are one draw


def make_point(name: str, size: int, value: float, known: bool = True) -> BatchFigures:
    interval = Interval(value, value - 0.1, value + 0.1) if known else Interval(value, float("nan"), float("nan"))
    return BatchFigures(
        contestant=name,
        size=size,
        groups=8,
        sequences=8,
        tokens=80,
        tokens_per_second=interval,
        speedup=interval,
        tau=None if name == "plain" else interval,
        rows=1.0,
        drafted=2.0,
        identical=8,
    )


def test_the_plot_has_a_line_and_a_label_for_each_contestant_and_a_mark_for_each_size():
    points = [
        make_point("plain", 1, 1.0),
        *(make_point(name, size, 1.5, known=size > 1) for name in ("a & b", "c") for size in (4, 1, 2)),
    ]
    svg = ElementTree.fromstring(standalone(speedup_by_batch(points, 0.0)))
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in svg.iter(f"{space}text")]
    assert {"a & b", "c", "1", "2", "4", "batch size"} <= set(words)
    curves = list(svg.iter(f"{space}polyline"))
    assert [len((c.get("points") or "").split()) for c in curves] == [3, 3]
    spread = [line for line in svg.iter(f"{space}line") if (line.get("class") or "").startswith("spread")]
    assert len(spread) == 4  # none where there is no interval
    assert "1: 1.50×" in (svg.get("aria-label") or "")
    across = [float(p.split(",")[0]) for p in (curves[0].get("points") or "").split()]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)  # equally far apart
