"""The probable faults of an engine, from the figures that differ from ours.

A suspicion is no proof: it names the kind of mistake that shows in this way, and so where to begin to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from .engine_vs_decoder import ServedComparison
from .fault_models import Explanation

SAME = 0.75  # of the prompts whose drafts must be ours, in float32 at temperature 0
NONE_ACCEPTED = 0.25  # of our acceptance at the first position: below it, drafts are as good as random


class Suspicion(BaseModel, extra="forbid"):
    """A probable fault.

    Attributes:
        kind: target, tie, depth, drafts, lookup, vocabulary, first, later, one-hot or sampling; of the server itself
            version, tokenizer or template.
        temperature: at which it shows; None for what the server says of itself.
        because: the difference. suspect: its usual cause.
    """

    kind: str
    temperature: float | None
    because: str
    suspect: str

    def __str__(self) -> str:
        where = "" if self.temperature is None else f"temperature {self.temperature:g}: "
        return f"{where}{self.because}. Suspect {self.suspect}."


SUSPECTS = {
    "target": "another target: its weights, dtype, adapter, chat template or special tokens",
    "tie": "a near-tie that another order of sums decides otherwise (float32 on both sides would show)",
    "depth": "num_speculative_tokens, which each engine counts in its own way",
    "drafts": (
        "what the drafter reads or its weights; this engine does not count acceptance by position, which would tell "
        "more (`outrider lint` looks at the files)"
    ),
    "vocabulary": (
        "the draft vocabulary (d2t must hold offsets, not ids), weights that were never loaded, or a transposed or "
        "permuted tensor"
    ),
    "first": (
        "what the first draft reads: taps (their numbering), the norms of the taps or of the input, embeddings, the "
        "weights' order in fc or attention, rotary embeddings"
    ),
    "later": (
        "what only later drafts read: norm_output and norm_before_residual, the positions and the rotary embeddings of "
        "drafted tokens, the drafter's cache after a rejection"
    ),
    "one-hot": (
        "drafts that are picked, not drawn: ask the engine for drawn ones (vLLM: draft_sample_method 'probabilistic')"
    ),
    "sampling": (
        "the engine's sampling when it speculates: temperatures, top-k or top-p of a request that do not reach its "
        "verification"
    ),
    "version": "a copy too old for this export: install a newer one",
    "tokenizer": "the server's tokenizer files, or its --tokenizer: the target sees other tokens of a user's text",
    "template": "the server's chat template (its --chat-template, or the target's own that changed)",
}


def suspicions(
    comparisons: Sequence[ServedComparison],
    tolerance: float,
    exact: bool = True,
    explanation: Explanation | None = None,
) -> list[Suspicion]:
    """Return the probable faults; [] if the engine does the same as our decoder.

    Args:
        exact: both sides compute in float32, in which they should accept the same drafts one by one.
        explanation: the mistake that explains the engine's acceptance at temperature 0, if there is one.
    """
    wrong = [c for c in comparisons if c.temperature == 0 and drafts_differ(c, tolerance, exact)]
    return [s for c in comparisons for s in _of(c, tolerance, exact, not wrong, explanation)]


def drafts_differ(compared: ServedComparison, tolerance: float, exact: bool) -> bool:
    """Tell whether the engine's drafts are not ours: more or fewer are accepted, or other ones."""
    others = exact and compared.same_drafts is not None and compared.same_drafts < SAME * compared.num_prompts
    return not compared.agrees(tolerance) or (others and not compared.divergences)


def _of(
    compared: ServedComparison, tolerance: float, exact: bool, greedy_is_right: bool, explanation: Explanation | None
) -> Iterator[Suspicion]:
    yield from _text(compared)
    depth = compared.drafted_served
    # Where nothing was drafted the difference is nan, and not small either.
    if depth is not None and not abs(depth - compared.drafted_own) <= 0.3:
        because = f"{depth:.2f} draft tokens per round, {compared.drafted_own:.2f} expected"
        yield _suspicion("depth", compared, because)
    elif compared.temperature == 0 and explanation is not None and not greedy_is_right:
        yield Suspicion(kind=explanation.kind, temperature=0.0, because=_seen(compared), suspect=str(explanation))
    elif compared.temperature == 0 and drafts_differ(compared, tolerance, exact):
        yield _suspicion(_drafts(compared), compared, _seen(compared))
    elif not compared.agrees(tolerance):
        kind = _sampled(compared, tolerance) if greedy_is_right else _drafts(compared)
        yield _suspicion(kind, compared, _seen(compared))
    elif compared.temperature > 0 and compared.length.excludes(0.0) and abs(compared.length.value) > 1:
        because = f"texts are {compared.length.value:+.1f} tokens longer than ours {compared.length.bounds(1)}"
        yield _suspicion("sampling", compared, because)


def _text(compared: ServedComparison) -> Iterator[Suspicion]:
    if not compared.divergences:
        return
    early = [d for d in compared.divergences if d.index < d.length / 4]
    kind = "target" if 2 * len(compared.divergences) > compared.num_prompts or len(early) > 2 else "tie"
    first = min(compared.divergences, key=lambda d: d.index)
    because = (
        f"{len(compared.divergences)} of {compared.num_prompts} texts are not ours, "
        f"the first from token {first.index} on ({first.suite}/{first.prompt})"
    )
    yield _suspicion(kind, compared, because)


def _drafts(compared: ServedComparison) -> str:
    """Return the kind of fault in the drafts themselves, by the first position that differs."""
    if "by_position" in compared.uncounted:
        return "drafts"
    first = compared.positions[0] if compared.positions else None
    if compared.parts_at not in (None, 1):
        return "later"
    return "vocabulary" if first is not None and first.served < NONE_ACCEPTED * first.own else "first"


def _sampled(compared: ServedComparison, tolerance: float) -> str:
    """Return the kind of fault above temperature 0 where all is right at temperature 0."""
    near = compared.one_hot_difference
    if near is not None and compared.one_hot is not None:
        is_near = not near.excludes(0.0) or abs(near.value) <= tolerance * compared.one_hot.value
        if is_near and not compared.length.excludes(0.0):
            return "one-hot"
    return "sampling"


def _seen(compared: ServedComparison) -> str:
    where = f", from position {compared.parts_at} on" if compared.parts_at else ""
    if "rounds" in compared.uncounted:
        where += "; the engine shows its own average of its latest rounds"
    if compared.same_drafts is not None:
        where += f"; the same drafts are accepted in {compared.same_drafts} of {compared.num_prompts} prompts"
    return (
        f"τ is {compared.served.text(3)} there and {compared.own.text(3)} here, "
        f"a difference of {compared.difference.value:+.3f} {compared.difference.bounds(3)}{where}"
    )


def _suspicion(kind: str, compared: ServedComparison, because: str) -> Suspicion:
    return Suspicion(kind=kind, temperature=compared.temperature, because=because, suspect=SUSPECTS[kind])


TOLERANCE = 0.02  # of τ: a difference that is certain, but smaller than this, does not matter


class ServedResult(BaseModel, extra="forbid"):
    """The result of `outrider served`.

    Attributes:
        engine: its name, its model, and how it was started.
        target, drafter, depth, max_new_tokens: see `Expectation`.
        tolerance: see `ServedComparison.agrees`.
        foreign: new tokens that the engine counted and we did not ask for: traffic of others, in the counts too.
    """

    schema_version: Literal[1] = 1
    created: str
    engine: dict[str, Any]
    target: str
    drafter: str
    depth: int
    max_new_tokens: int
    tolerance: float
    comparisons: list[ServedComparison]
    suspicions: list[Suspicion]
    foreign: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the engine does the same as our decoder."""
        return not self.suspicions

    @property
    def exit_code(self) -> int:
        return 0 if self.agrees else 1

    def at(self, temperature: float) -> ServedComparison:
        """Return the comparison at a temperature."""
        return next(c for c in self.comparisons if c.temperature == temperature)


_UNKNOWN = {
    "rounds": "its rounds (its τ is its own average of the latest ones, so only differences above 10% count)",
    "drafted": "its draft tokens (so it may draft to another depth)",
    "by_position": "acceptance by position (so where drafts differ is unknown)",
}


def lines(result: ServedResult) -> list[str]:
    """Return the result in sentences, the verdict first."""
    verdict = "served equals measured" if result.agrees else "served differs from measured"
    name = result.engine.get("name")
    text = [f"{verdict}: {result.drafter}, depth {result.depth}, {name or 'engine'}"]
    for c in result.comparisons:
        text += _figures(c)
    if uncounted := sorted({u for c in result.comparisons for u in c.uncounted}):
        text.append(f"{name or 'this engine'} does not count {', '.join(_UNKNOWN[u] for u in uncounted)}")
    if unchecked := result.engine.get("unchecked"):
        text.append(f"not checked: {unchecked}")
    if result.foreign:
        text.append(f"{result.foreign} tokens of others were counted too: measure on an engine that nobody else uses")
    return text + [str(s) for s in result.suspicions]


def _figures(c: ServedComparison) -> list[str]:
    texts = "" if c.identical is None else f"; {c.identical} of {c.num_prompts} texts identical"
    speed = "" if c.speedup is None else f"; {c.speedup.text(unit='×')} the speed of that engine without drafts"
    first = (
        f"temperature {c.temperature:g}: τ {c.served.text(3)} there, {c.own.text(3)} here, "
        f"difference {c.difference.value:+.3f} {c.difference.bounds(3)}{texts}{speed}"
    )
    positions = ", ".join(f"{p.position}: {p.served:.2f} / {p.own:.2f}{' !' if p.parted else ''}" for p in c.positions)
    return [first, f"  accepted by position, there / here: {positions}"] if positions else [first]
