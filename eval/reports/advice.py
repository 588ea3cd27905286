"""Remarks on figures that are easily misread, and the decision that a report ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .figures import Figures
from .report import ContestantInfo, Report

_ENOUGH = 10  # rounds that reached a depth before its alpha is judged
_KNOWS = 0.5  # alpha at depth 1 below which a drafter is not worth another plan


def remarks(report: Report) -> list[str]:
    """Return a sentence for each figure that does not say what it seems to say."""
    drafters = [c for c in report.contestants if c.kind == "drafter"]
    found = [_cut(c, report.conditions.max_new_tokens) for c in drafters]
    for temperature in report.conditions.temperatures:
        found.append(alike(report, temperature))
        for f in report.overall(temperature):
            if (info := report.contestant(f.contestant)) in drafters:
                lost = collapse([d.alpha.value for d in f.alpha if d.reached >= _ENOUGH], info.trained_depth)
                found += [f"{f.contestant} at temperature {temperature:g}: {part}" for part in (_flat(f), lost) if part]
    if changed := report.conditions.target.get("changed"):
        found.append(f"the drafter was trained for another target, of which differ: {changed} (target.allow_changed).")
    return [remark for remark in (*found, *report.findings) if remark]


def collapse(rates: Sequence[float], trained: int | None) -> str:
    """Return a sentence on alphas (`rates`, by depth) that more than halve after the depth a drafter was trained at.

    "" if they do not, or if nothing is drafted after it.
    """
    if trained is None or not 0 < trained < len(rates) or rates[trained] >= rates[trained - 1] / 2:
        return ""
    return (
        f"alpha falls from {rates[trained - 1]:.2f} at depth {trained}, the last it was trained at, to "
        f"{rates[trained]:.2f} at depth {trained + 1}; draft no deeper than {trained}, or train it with more steps."
    )


def _cut(info: ContestantInfo, max_new_tokens: int) -> str:
    most = max_new_tokens - 1
    if info.depth is None or info.depth < most:
        return ""
    return f"{info.label}: of {max_new_tokens} new tokens a round can emit {most}; a deeper plan is cut to that."


def alike(report: Report, temperature: float) -> str:
    """Return a sentence if more than half of the target's answers are the same."""
    answers = [r.answer for r in report.records_of(report.baselines.plain, temperature) if r.answer]
    most = max(Counter(answers).values(), default=0)
    if most < 2 or 2 * most <= len(answers):
        return ""
    return (
        f"{most} of {len(answers)} answers alike at temperature {temperature:g}: the intervals take prompts for "
        "independent; measure prompts whose answers differ."
    )


def _flat(figures: Figures) -> str:
    """Return a sentence on the figures whose interval has no width."""
    rates = (("τ", figures.tau), ("acceptance rate", figures.acceptance_rate))
    names = [name for name, interval in rates if interval is not None and interval.has_no_width]
    depths = [str(d.depth) for d in figures.alpha if d.alpha.has_no_width]
    names += [f"alpha at depth {', '.join(depths)}"] if depths else []
    same = f"all {figures.num_prompts} prompts gave the same {', '.join(names)}"
    return f"{same}; an interval without width says nothing about other prompts." if names else ""


def decision(report: Report) -> str:
    """Return what to serve, at the first temperature, and what to do next; "" for a report without a drafter.

    `Serve with: eagle3 + ngram tuned, depth 7, 2.33× [1.70, 3.35]. eagle3, depth 4: no gain shown. Next: …`

    A temperature at which something else is fastest is named after it: n-grams, say, find little in drawn text.
    """
    if report.primary is None:
        return ""
    heat, *others = report.conditions.temperatures
    best, own = _best(report, heat), report.headline()
    parts = ["Serve the plain target." if best is None else f"Serve with: {_named(report, best)}."]
    if best is not own:
        parts.append(f"{report.contestant(own.contestant).label}: {_verdict(own)}.")
    for other in others:
        there = _best(report, other)
        if (there and there.contestant) != (best and best.contestant):
            parts.append(f"At temperature {other:g}: {'the plain target' if there is None else _named(report, there)}.")
    return " ".join([*parts, _next_step(report, own)]).strip()


def _best(report: Report, temperature: float) -> Figures | None:
    """Return the figures of the fastest drafter that gains by its whole interval; None if none does."""
    drafting = [f for f in report.overall(temperature) if report.contestant(f.contestant).kind == "drafter"]
    return max(filter(_gains, drafting), key=lambda f: f.speedup.value, default=None)


def _named(report: Report, figures: Figures) -> str:
    lossy = ", lossy" if "lossy" in figures.rule else ""
    return f"{report.contestant(figures.contestant).label}, {figures.speedup.text(unit='×')}{lossy}"


def _gains(figures: Figures) -> bool:
    return figures.speedup.excludes(1) and figures.speedup.value > 1


def _verdict(figures: Figures) -> str:
    speedup = figures.speedup
    if not speedup.known:
        return f"{speedup.main(unit='×')} without an interval, too few prompts"
    return speedup.text(unit="×") if speedup.excludes(1) else f"no gain shown, {speedup.text(unit='×')}"


def _next_step(report: Report, own: Figures) -> str:
    """Return what would help the first drafter most."""
    info, rates = report.contestant(own.contestant), [d.alpha.value for d in own.alpha if d.reached >= _ENOUGH]
    if not own.speedup.known:
        return "Next: measure more prompts."
    if collapse(rates, info.trained_depth):
        return f"Next: depth {info.trained_depth}, or more steps in training."
    if not _gains(own) and rates and rates[0] < _KNOWS:
        return f"Next: more data or training, since {rates[0]:.0%} of its first drafts are accepted."
    if not _gains(own) and own.speedup.value > 1:
        return "Next: more prompts, since the interval holds 1."
    if any(c.tuned for c in report.contestants):
        return "" if _gains(own) else "Next: more data or training, since no plan makes up for it."
    return "Next: `outrider tune` finds the fastest plan."
