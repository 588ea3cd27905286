"""A probe: whether a pair's drafter is still right for a changed target, in a minute, from that target's responses.

What is compared, per calibration prompt, with what the pair measured on its own target:

- τ in the decoder. The target writes its response with the drafter attached, which costs less than without it, is the
  target's own text all the same, and counts rounds on the way. Where the pair is meant for greedy decoding this
  decides: the analytic alpha is defined at temperature 1 and can fall, or hold, while the most probable token does
  otherwise.
- analytic τ: 1 + Σ_d Π alpha_i with alpha = Σ min(p, q), teacher-forced on that response. Where the pair is meant for
  sampling this decides: it is the expectation of what the decoder would draw, without the noise of drawing it.
- alpha and top-1 agreement at depth 1, reported for people in both cases.

The comparison is a ratio on the same prompts, resampled together, so what makes one prompt easy and another hard
cancels. The same ratio times the τ of the pair's report predicts the τ that its suites would now show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from rich.console import Console

from ..common import BadInputError, IncompatibleError
from ..eval.reports.figures import Interval, Ratio
from ..eval.reports.statistics import Bootstrap
from ..heads import HEADS
from ..targets import Target
from .calibration import NUM_PROMPTS, calibrate, first_of_each_suite, rendered
from .manifest import ProbeBaseline, PromptMeasure
from .pair import Pair

TOLERANCE = 0.05
Verdict = Literal["fresh", "stale", "incompatible"]
_UNKNOWN = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        verdict: "fresh", "stale", or "incompatible" (nothing was measured).
        certain: whether the interval of `ratio` lies on one side of 1 − tolerance.
        ratio: deciding τ on the new target ÷ the same on the pair's own.
        alpha, baseline: acceptance at depth 1 (analytic, temperature 1) on the new target and on the pair's own.
        tau, tau_baseline: deciding τ on the calibration prompts, new and then.
        tau_predicted: what the pair's headline τ would be on the new target; nan where the pair has no report.
        lines: all of it in words.
    """

    verdict: Verdict
    certain: bool = True
    ratio: Interval = _UNKNOWN
    alpha: Interval = _UNKNOWN
    baseline: Interval = _UNKNOWN
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
        BadInputError: the pair has no baseline, or another response length is asked for.
    """
    baseline = _baseline(pair, max_new_tokens)
    try:
        drafter = pair.drafter_for(target)
    except IncompatibleError as error:
        return ProbeResult("incompatible", lines=[str(error)])
    changes = pair.fingerprint().differences(target.fingerprint())
    prompts = first_of_each_suite(pair.calibration(), num_prompts)
    own = pair.recipe().template
    now = own if template is None else dict(template)
    if "chat_template" in changes or now != own:
        prompts = rendered(prompts, target, now)
    changes += [_argument(name, own, now) for name in sorted({*own, *now}) if own.get(name) != now.get(name)]
    measured = calibrate(target, drafter, prompts, baseline, pair.plan, console)
    known = {m.id: m for m in baseline.prompts}
    return _judge(pair, baseline, changes, measured, [known[m.id] for m in measured], tolerance, seed)


def _baseline(pair: Pair, max_new_tokens: int | None) -> ProbeBaseline:
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
    return baseline


# ------------------------------------------------------------ the verdict


@dataclass(frozen=True)
class _ProbeComparison:
    """The same prompts measured twice, resampled together; values are new, then the baseline's."""

    new: Sequence[PromptMeasure]
    old: Sequence[PromptMeasure]
    bootstrap: Bootstrap

    @classmethod
    def of(cls, new: Sequence[PromptMeasure], old: Sequence[PromptMeasure], seed: int) -> _ProbeComparison:
        strata = [len(list(group)) for _, group in groupby(new, key=lambda m: m.suite)]
        return cls(new, old, Bootstrap(strata, seed=seed))

    def both(self, figure: Callable[[Sequence[PromptMeasure]], Ratio]) -> tuple[Interval, Interval]:
        return self.bootstrap.ratio(figure(self.new)), self.bootstrap.ratio(figure(self.old))

    def change(self, figure: Callable[[Sequence[PromptMeasure]], Ratio]) -> Interval:
        return self.bootstrap.quotient(figure(self.new), figure(self.old))


def _decoder_tau(measures: Sequence[PromptMeasure]) -> Ratio:
    return Ratio([m.accepted for m in measures], [m.rounds for m in measures], offset=1.0)


def _analytic_tau(measures: Sequence[PromptMeasure]) -> Ratio:
    return Ratio([m.analytic_tau for m in measures], [m.chains for m in measures])


def _alpha(measures: Sequence[PromptMeasure]) -> Ratio:
    return Ratio([m.alpha for m in measures], [m.positions for m in measures])


def _top1(measures: Sequence[PromptMeasure]) -> Ratio:
    return Ratio([m.top1 for m in measures], [m.positions for m in measures])


def _judge(
    pair: Pair,
    baseline: ProbeBaseline,
    changes: list[str],
    new: Sequence[PromptMeasure],
    old: Sequence[PromptMeasure],
    tolerance: float,
    seed: int,
) -> ProbeResult:
    compared = _ProbeComparison.of(new, old, seed)
    deciding = _decoder_tau if baseline.temperature == 0 else _analytic_tau
    ratio = compared.change(deciding)
    if math.isnan(ratio.value):
        raise BadInputError(
            "the target's responses on the calibration prompts are too short to measure anything: it ends them at once."
        )
    verdict, certain = decide(ratio, 1 - tolerance)
    result = ProbeResult(
        verdict,
        certain,
        ratio,
        *compared.both(_alpha),
        *compared.both(deciding),
        _predicted(pair, baseline.temperature, ratio),
    )
    depth1 = _depth1(result, compared, HEADS[pair.manifest.drafter.type].trainable)
    return replace(
        result,
        lines=[*_changes(changes), *_figures(result, compared, baseline), depth1, _conclusion(result, tolerance)],
    )


def decide(ratio: Interval, bound: float) -> tuple[Literal["fresh", "stale"], bool]:
    """Return the verdict, and whether the whole interval agrees with it."""
    verdict: Literal["fresh", "stale"] = "fresh" if ratio.value > bound else "stale"
    certain = ratio.known and (ratio.low > bound or ratio.high < bound)
    return verdict, certain


def _predicted(pair: Pair, temperature: float, ratio: Interval) -> Interval:
    """Return the report's τ times the ratio; its interval is the ratio's, since the suites stay the same."""
    tau = next((h.tau.value for h in pair.manifest.measurements.headline if h.temperature == temperature), None)
    return _UNKNOWN if tau is None else Interval(tau * ratio.value, tau * ratio.low, tau * ratio.high)


# ------------------------------------------------------------ in words


def _changes(changes: list[str]) -> list[str]:
    return (
        [f"the target changed: {', '.join(changes)}"] if changes else ["the target is the one this pair was made for"]
    )


def _argument(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    was, is_now = (repr(given[name]) if name in given else "not given" for given in (before, now))
    return f"the chat template's argument {name} (was {was}, is {is_now})"


def _figures(result: ProbeResult, compared: _ProbeComparison, baseline: ProbeBaseline) -> list[str]:
    how = (
        "greedy, in the decoder"
        if baseline.temperature == 0
        else f"analytic, on responses at temperature {baseline.temperature:g}"
    )
    lines = [
        f"τ = 1 + mean accepted ({how}; {len(compared.new)} prompts, up to {baseline.max_new_tokens} new tokens): "
        f"{result.tau.text()}, was {result.tau_baseline.text()}",
        f"ratio on the same prompts: {result.ratio.text(3)}",
    ]
    if not math.isnan(result.tau_predicted.value):
        lines.append(f"predicted τ on the pair's suites: {result.tau_predicted.text()}")
    return lines


def _depth1(result: ProbeResult, compared: _ProbeComparison, analytic: bool) -> str:
    if not analytic:
        return f"first drafts accepted: {result.alpha.text()}, was {result.baseline.text()}"
    top1, top1_then = compared.both(_top1)
    return (
        f"at depth 1: analytic alpha {result.alpha.text()}, was {result.baseline.text()}; "
        f"top-1 agreement {top1.text()}, was {top1_then.text()}"
    )


def _conclusion(result: ProbeResult, tolerance: float) -> str:
    doubt = "" if result.certain else " Uncertain: the interval holds the bound; more calibration prompts would tell."
    change = f"τ changed by {100 * (result.ratio.value - 1):+.1f}% (tolerance −{100 * tolerance:g}%)."
    return f"{result.verdict}: {change}{doubt}"
