"""A probe: whether a pair's drafter is still right for a changed target, in a minute, from that target's responses.

Three figures on the calibration prompts are compared with those on the pair's own target:

- τ in the decoder, which writes the target's response. It decides for pairs meant for greedy decoding: the analytic
  alpha is defined at temperature 1, and need not follow the most probable token.
- analytic τ: 1 + Σ_d Π alpha_i with alpha = Σ min(p, q), teacher-forced on that response. It decides for pairs meant
  for sampling: it is the decoder's expectation, without the noise of drawing.
- alpha and top-1 agreement at depth 1, for people.

The comparison is a ratio on the same prompts, resampled together, so that easy and hard prompts cancel. The ratio times
the τ of the pair's report predicts the τ of its suites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from rich.console import Console

from ..common import BadInputError, IncompatibleError
from ..distill.sources import some_of_each
from ..eval.reports.figures import Interval, Ratio
from ..eval.reports.statistics import Bootstrap
from ..heads import HEADS, Drafter
from ..targets import Target
from .calibration import NUM_PROMPTS, calibrate, rendered
from .manifest import ProbeBaseline, PromptMeasure
from .pair import Pair

TOLERANCE = 0.05
Verdict = Literal["fresh", "stale", "incompatible"]
_UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        verdict: "fresh", "stale", or "incompatible" (nothing was measured).
        certain: whether the interval of `ratio` lies on one side of 1 − tolerance.
        ratio: deciding τ on the new target ÷ on the pair's own.
        alpha, alpha_baseline: acceptance at depth 1 (analytic, temperature 1) on the new target and on the pair's own.
        tau, tau_baseline: deciding τ on the calibration prompts, on the new target and on the pair's own.
        tau_predicted: the pair's headline τ on the new target; nan where the pair has no report.
        lines: all of it in words.
    """

    verdict: Verdict
    certain: bool = True
    ratio: Interval = _UNKNOWN
    alpha: Interval = _UNKNOWN
    alpha_baseline: Interval = _UNKNOWN
    tau: Interval = _UNKNOWN
    tau_baseline: Interval = _UNKNOWN
    tau_predicted: Interval = _UNKNOWN
    lines: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return {"fresh": 0, "stale": 1, "incompatible": 3}[self.verdict]


def probe(
    pair: Pair,
    target: Target,
    num_prompts: int = NUM_PROMPTS,
    max_new_tokens: int | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
    template: Mapping[str, Any] | None = None,
) -> ProbeResult:
    """Measure the pair's drafter on `target` and compare it with the pair's baseline.

    Fresh: τ keeps more than 1 − `tolerance` of its baseline; stale: less. Where the interval of the ratio holds that
    bound, the point estimate decides, and the result says that it is uncertain.

    Args:
        num_prompts: of the pair's calibration prompts, at most all.
        max_new_tokens: None for the baseline's; another length would compare different things.
        seed: of the bootstrap. The texts are keyed by the baseline's own.
        template: arguments that the chat template gets now; None for the pair's own.

    Raises:
        BadInputError: the pair has no baseline, or one of other prompts; or another response length is asked for.
    """
    baseline = pair.manifest.measurements.baseline
    if baseline is None:
        raise BadInputError(
            f"{pair.folder}: this pair was made without calibration prompts, so there is nothing to compare with. Make "
            "it again with some."
        )
    if max_new_tokens not in (None, baseline.max_new_tokens):
        raise BadInputError(
            f"the pair's baseline has responses of up to {baseline.max_new_tokens} tokens, {max_new_tokens} were asked "
            "for; leave it out."
        )
    try:
        drafter = pair.drafter_for(target)
    except IncompatibleError as error:
        return ProbeResult("incompatible", lines=[str(error)])
    changes = pair.fingerprint().differences(target.fingerprint())
    prompts = some_of_each(pair.calibration(), num_prompts, lambda prompt: prompt.suite)
    known = {m.id: m for m in baseline.prompts}
    if unknown := [p.id for p in prompts if p.id not in known]:
        raise BadInputError(
            f"{pair.folder}: its baseline has no figures of the calibration prompt {unknown[0]!r}; make the pair again."
        )
    own = pair.recipe().template
    now = own if template is None else dict(template)
    if "chat_template" in changes or now != own:
        prompts = rendered(prompts, target, now)
    for name in sorted({*own, *now}):
        if own.get(name) != now.get(name):
            was, is_now = (repr(given[name]) if name in given else "not given" for given in (own, now))
            changes.append(f"the chat template's argument {name} (was {was}, is {is_now})")
    measured = calibrate(target, drafter, prompts, baseline, pair.plan, console)
    old = [known[m.id] for m in measured]
    return _judge(pair, target.precision, baseline, changes, measured, old, tolerance, seed)


@dataclass(frozen=True)
class DrafterChange:
    """τ of another drafter in the place of a pair's own, on the pair's calibration prompts, with what they are.

    Attributes:
        ratio: tau ÷ tau_before, on the same prompts.
    """

    tau: Interval
    tau_before: Interval
    ratio: Interval
    num_prompts: int
    max_new_tokens: int
    temperature: float


def drafter_change(
    pair: Pair, target: Target, drafter: Drafter, console: Console | None = None, seed: int = 0
) -> DrafterChange | None:
    """Return what becomes of τ on the pair's target by another drafter; None for a pair without a baseline."""
    baseline = pair.manifest.measurements.baseline
    if baseline is None:
        return None
    new, old = calibrate(target, drafter, pair.calibration(), baseline, pair.plan, console), baseline.prompts
    intervals = (tau_of(new, baseline, seed), tau_of(old, baseline, seed), tau_change(new, old, baseline, seed))
    return DrafterChange(*intervals, len(new), baseline.max_new_tokens, baseline.temperature)


def tau_of(measures: Sequence[PromptMeasure], baseline: ProbeBaseline, seed: int = 0) -> Interval:
    """Return the deciding τ of a pair with this baseline on the measured prompts."""
    return _bootstrap(measures, seed).ratio(_ratio(measures, _deciding(baseline)))


def tau_change(
    new: Sequence[PromptMeasure], old: Sequence[PromptMeasure], baseline: ProbeBaseline, seed: int = 0
) -> Interval:
    """Return the deciding τ of `new` ÷ that of `old`, which measure the same prompts, matched by their ids."""
    figure, known = _deciding(baseline), {measure.id: measure for measure in old}
    same = [known[measure.id] for measure in new]
    return _bootstrap(new, seed).quotient(_ratio(new, figure), _ratio(same, figure))


# Numerator, denominator and offset of each figure, a ratio over prompts.
_DECODER_TAU, _ANALYTIC_TAU = ("accepted", "rounds", 1.0), ("analytic_tau", "chains", 0.0)
_ALPHA, _TOP1 = ("alpha", "positions", 0.0), ("top1", "positions", 0.0)


def _ratio(measures: Sequence[PromptMeasure], figure: tuple[str, str, float]) -> Ratio:
    above, below, offset = figure
    return Ratio([getattr(m, above) for m in measures], [getattr(m, below) for m in measures], offset)


def _deciding(baseline: ProbeBaseline) -> tuple[str, str, float]:
    """Return the figure that decides: what the decoder counts of greedy text, else the analytic τ."""
    return _DECODER_TAU if baseline.temperature == 0 else _ANALYTIC_TAU


def _bootstrap(measures: Sequence[PromptMeasure], seed: int) -> Bootstrap:
    return Bootstrap([len(list(group)) for _, group in groupby(measures, key=lambda m: m.suite)], seed=seed)


def _judge(
    pair: Pair,
    precision: str,
    baseline: ProbeBaseline,
    changes: list[str],
    new: Sequence[PromptMeasure],
    old: Sequence[PromptMeasure],
    tolerance: float,
    seed: int,
) -> ProbeResult:
    bootstrap = _bootstrap(new, seed)

    def both(figure: tuple[str, str, float]) -> tuple[Interval, Interval]:
        return bootstrap.ratio(_ratio(new, figure)), bootstrap.ratio(_ratio(old, figure))

    deciding = _deciding(baseline)
    ratio = bootstrap.quotient(_ratio(new, deciding), _ratio(old, deciding))
    if math.isnan(ratio.value):
        raise BadInputError(
            "the target's responses on the calibration prompts are too short to measure anything: it ends them at once."
        )
    # The interval of the prediction is the ratio's, since the suites stay the same.
    headline = pair.manifest.measurements.headline
    tau = next((h.tau.value for h in headline if h.temperature == baseline.temperature), None)
    predicted = _UNKNOWN if tau is None else predict(tau, ratio)
    result = ProbeResult(*decide(ratio, 1 - tolerance), ratio, *both(_ALPHA), *both(deciding), predicted)
    changed = f"the target changed: {', '.join(changes)}" if changes else "the target is the one this pair was made for"
    if (made_for := pair.manifest.target.precision) != precision:
        then, now = result.tau_baseline.text(), result.tau.text()
        changed = f"this drafter was made for {made_for}: on {precision} τ {then} → {now}; {changed}"
    top1 = both(_TOP1) if HEADS[pair.manifest.drafter.type].trainable else None
    return replace(result, lines=[changed, *_figures(result, baseline, len(new), top1), _conclusion(result, tolerance)])


def predict(tau: float, ratio: Interval) -> Interval:
    """Return the τ that `ratio` makes of `tau`: never below 1, since a round emits the target's own token at least."""
    return Interval(*(max(tau * part, 1.0) for part in (ratio.value, ratio.low, ratio.high)))


def decide(ratio: Interval, bound: float) -> tuple[Literal["fresh", "stale"], bool]:
    """Return the verdict, and whether the whole interval agrees with it."""
    verdict: Literal["fresh", "stale"] = "fresh" if ratio.value > bound else "stale"
    certain = ratio.known and (ratio.low > bound or ratio.high < bound)
    return verdict, certain


def _figures(
    result: ProbeResult, baseline: ProbeBaseline, num_prompts: int, top1: Sequence[Interval] | None
) -> list[str]:
    """Return the figures in words; `top1` of the two targets is None where it is counted, not analytic."""
    how = f"analytic, on responses at temperature {baseline.temperature:g}"
    if baseline.temperature == 0:
        how = "greedy, in the decoder"
    lines = [
        f"τ, tokens emitted per round ({how}; {num_prompts} prompts, up to {baseline.max_new_tokens} new tokens): "
        f"{result.tau.text()}, was {result.tau_baseline.text()}",
        f"ratio on the same prompts: {result.ratio.text(3)}",
    ]
    if not math.isnan(result.tau_predicted.value):
        lines.append(f"predicted τ on the pair's suites: {result.tau_predicted.text()}")
    alpha = f"{result.alpha.text()}, was {result.alpha_baseline.text()}"
    if top1 is None:
        return [*lines, f"first drafts accepted: {alpha}"]
    agreed, agreed_then = (interval.text() for interval in top1)
    return [*lines, f"at depth 1: analytic alpha {alpha}; top-1 agreement {agreed}, was {agreed_then}"]


def _conclusion(result: ProbeResult, tolerance: float) -> str:
    doubt = "" if result.certain else " Uncertain: the interval holds the bound; more calibration prompts would tell."
    change = f"τ changed by {100 * (result.ratio.value - 1):+.1f}% (tolerance −{100 * tolerance:g}%)."
    return f"{result.verdict}: {change}{doubt}"
