"""The probable faults of an engine, from the figures that differ from ours.

A suspicion says what the evidence separates, and no more: faults that show in the same way are named together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from ..eval.reports.figures import Interval
from .engine_vs_decoder import Divergence, ServedComparison, fault_explainer

SAME = 0.95  # of the prompts whose text is ours: so many must have our drafts, in float32 at temperature 0
NONE_ACCEPTED = 0.25  # of our acceptance at the first position: below it, drafts are as good as random
BEYOND_ROUNDING = 2.0  # times what bfloat16 does to our target's log-probabilities: more than another dtype does
PLACES = ("vocabulary", "first", "later")  # kinds of faults in the drafts, before mistakes were tried
TOKENS, NATS = 1.0, 0.05  # texts that are longer, or less probable a token, by no more than this are ours


class Suspicion(BaseModel, extra="forbid"):
    """A probable fault.

    Attributes:
        kind: a key of `SUSPECTS`, or lookup.
        temperature: at which it shows; None for what the server says of itself.
        because: the difference. suspect: its usual causes.
    """

    kind: str
    temperature: float | None
    because: str
    suspect: str

    def __str__(self) -> str:
        where = "" if self.temperature is None else f"temperature {self.temperature:g}: "
        return f"{where}{self.because}. Suspect {self.suspect}."


_SAMPLING = (
    "the engine's sampling when it speculates: temperatures, top-k or top-p of a request that do not reach its "
    "verification"
)
_SCALE = "the size of the drafter's logits (lm_head, the final norm), or how the engine draws drafts"
SUSPECTS = {
    "target": (
        "another target (its weights, dtype or adapter), or requests that are changed on their way (special tokens, a "
        "limit, penalties)"
    ),
    "drawn": (
        "a temperature, top-k or top-p that the server, or a proxy before it, puts in place of the request's: at "
        "temperature 0 nothing is drawn"
    ),
    "dtype": (
        "another dtype than the pair's, or weights that differ by as little: no text parts where the target is surer "
        "than rounding"
    ),
    "scale of logits": (
        "the target's weights, its final norm, or a scale of its logits: it picks our tokens with other probabilities"
    ),
    "end": "where texts end: the target's end-of-text tokens (generation_config.json), or a limit of the server",
    "depth": "num_speculative_tokens, which each engine counts in its own way",
    "drafts": (
        "what the drafter reads or its weights; this engine does not count acceptance by position, which would tell "
        "more (`outrider lint` looks at the files)"
    ),
    "vocabulary": (
        "the draft vocabulary (d2t must hold offsets, not ids), weights or embeddings that are others or were never "
        "loaded, or a transposed or permuted tensor"
    ),
    "first": (
        "what the first draft reads: taps (their numbering), the norms of the taps or of the input, embeddings, the "
        "weights' order in fc or attention, rotary embeddings; or weights that are others, rounded or lost in part"
    ),
    "later": (
        "what only later drafts read: norm_output and norm_before_residual, the positions and the rotary embeddings of "
        "drafted tokens, the drafter's cache after a rejection; or embeddings or weights that are others, on which "
        "first drafts depend less"
    ),
    "one-hot": (
        "drafts that are picked, not drawn: ask the engine for drawn ones (vLLM: draft_sample_method 'probabilistic'), "
        "or drafter's logits that are much too large"
    ),
    "version": "a copy too old for this export: install a newer one",
    "tokenizer": "the server's tokenizer files, or its --tokenizer: the target sees other tokens of a user's text",
    "template": "the server's chat template (its --chat-template, or the target's own that changed)",
    "sampling": _SAMPLING,
    "scale": f"{_SCALE}: the texts are as probable as they should be, so the target's part is right",
    "either": f"{_SAMPLING}; or {_SCALE}: without the target's probabilities these cannot be told apart",
}


def suspicions(comparisons: Sequence[ServedComparison], tolerance: float, dtype: str = "float32") -> list[Suspicion]:
    """Return the probable faults; [] if the engine does the same as our decoder.

    Args:
        dtype: the pair's. In float32 both sides should accept the same drafts one by one.
    """
    greedy = [s for c in comparisons if c.temperature == 0 for s in _greedy(c, tolerance, dtype)]
    # The same fault shows above temperature 0, too, where it is less specific.
    return greedy or [s for c in comparisons if c.temperature > 0 for s in _drawn(c, tolerance)]


def _greedy(compared: ServedComparison, tolerance: float, dtype: str) -> Iterator[Suspicion]:
    kind = None
    parted = compared.parted(dtype)
    same_target = compared.same_target(dtype)
    if parted:
        kind = _rounded(compared) if all(d.is_tie("bfloat16") for d in parted) else "target"
        kind = "end" if all(d.ending for d in parted) else kind
        kind = "drawn" if compared.unsteady else kind
        yield _suspicion(kind, compared, _texts(compared, parted))
    elif not same_target:
        kind = "dtype" if _rounded(compared) == "dtype" else "scale of logits"
        yield _suspicion(kind, compared, f"texts are ours{_off(compared)}")
    if depth := _depth(compared):
        yield depth
    # Another target moves the drafts, too, so drafts are not judged then.
    elif kind in (None, "end", "dtype") and _drafts_differ(compared, tolerance, same_target and dtype == "float32"):
        place, suspect = _explained(compared)
        yield Suspicion(kind=place, temperature=0.0, because=_seen(compared), suspect=suspect)


def _rounded(compared: ServedComparison) -> str:
    """Return the kind of a fault whose texts part only where our target is hardly surer than bfloat16 rounds."""
    off, rounding = compared.off, compared.rounding
    return "dtype" if off is None or rounding is None or off <= BEYOND_ROUNDING * rounding else "target"


def _off(compared: ServedComparison) -> str:
    if compared.off is None:
        return ""
    rounding = f", in bfloat16 ours by {compared.rounding:.2g}" if compared.rounding else ""  # none where it is ours
    return f"; log-probabilities differ by {compared.off:.2g} nats a token{rounding}"


def _drafts_differ(compared: ServedComparison, tolerance: float, exact: bool) -> bool:
    """Return whether the engine's drafts at temperature 0 are not ours: more, fewer, or other ones are accepted."""
    if compared.identical == 0:
        return False
    if exact and compared.same_drafts is not None:
        return compared.same_drafts < SAME * (compared.identical or 0)
    return not compared.agrees(tolerance)


def _texts(compared: ServedComparison, parted: Sequence[Divergence]) -> str:
    first = min(parted, key=lambda d: d.index)
    text = (
        f"{len(compared.divergences)} of {compared.num_prompts} texts are not ours, "
        f"the first from token {first.index} on ({first.suite}/{first.prompt})"
    )
    if compared.unsteady:
        text += ", and the first prompt got two texts as it was asked twice"
    margins = [d.margin for d in parted if d.margin is not None]
    text += f"; our target prefers its own tokens there by up to {max(margins):.3g} logits" if margins else ""
    return text + _off(compared)


def _depth(compared: ServedComparison) -> Suspicion | None:
    there, own = compared.drafted_served, compared.drafted_own
    if there is None or abs(there - own) <= 0.3:  # where nothing was drafted the difference is nan, and not small
        return None
    return _suspicion("depth", compared, f"{there:.2f} draft tokens per round, {own:.2f} expected")


def _explained(compared: ServedComparison) -> tuple[str, str]:
    """Return the kind of fault in the drafts, and its suspects."""
    place, explainer = _place(compared), fault_explainer()
    if explainer is None or not compared.candidates:
        return place, SUSPECTS[place]
    kind, suspects = explainer.described(compared, place, SUSPECTS[place])
    return kind, suspects


def _place(compared: ServedComparison) -> str:
    """Return the kind of fault in the drafts themselves, by the first position that differs."""
    if "by_position" in compared.uncounted:
        return "drafts"
    first = compared.positions[0] if compared.positions else None
    if compared.parts_at not in (None, 1):
        return "later"
    return "vocabulary" if first is not None and first.served < NONE_ACCEPTED * first.own else "first"


def _drawn(compared: ServedComparison, tolerance: float) -> Iterator[Suspicion]:
    """Yield what differs above temperature 0 alone."""
    texts = []
    length = compared.length
    surprise = compared.surprise
    if _differs(length, TOKENS):
        texts.append(f"texts are {length.value:+.1f} tokens longer than ours {length.bounds(1)}")
    # Beside another τ the smallest certain surprise tells that the texts are others.
    if surprise is not None and _differs(surprise, NATS if compared.agrees(tolerance) else 0.0):
        more = f"{surprise.value:+.3f} {surprise.bounds(3)}"
        texts.append(f"texts surprise our target by {more} nats per token more than its own draws would")
    tau = [] if compared.agrees(tolerance) else [_seen(compared)]
    if depth := _depth(compared):
        yield depth
    elif texts or tau:
        yield _suspicion("sampling" if texts else _drawn_drafts(compared, tolerance), compared, "; ".join(tau + texts))


def _differs(interval: Interval, least: float) -> bool:
    return interval.excludes(0.0) and abs(interval.value) > least


def _drawn_drafts(compared: ServedComparison, tolerance: float) -> str:
    """Return the kind of fault that shows only above temperature 0, and in acceptance alone."""
    near = compared.one_hot_difference
    if near is not None and compared.one_hot is not None and not _differs(near, tolerance * compared.one_hot.value):
        return "one-hot"
    return "either" if compared.surprise is None else "scale"


def _seen(compared: ServedComparison) -> str:
    where = f", from position {compared.parts_at} on" if compared.parts_at else ""
    if "rounds" in compared.uncounted:
        where += "; the engine shows its own average of its latest rounds"
    return (
        f"τ is {compared.served.text(3)} there and {compared.own.text(3)} here, "
        f"a difference of {compared.difference.value:+.3f} {compared.difference.bounds(3)}{where}{_same(compared)}"
    )


def _same(compared: ServedComparison) -> str:
    """Return how many prompts have our drafts, of those with our text; "" where that is not known."""
    same = compared.same_drafts
    return "" if same is None else f"; the same drafts are accepted in {same} of {compared.identical} prompts"


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
        f"difference {c.difference.value:+.3f} {c.difference.bounds(3)}{texts}{_same(c)}{speed}"
    )
    positions = ", ".join(f"{p.position}: {p.served:.2f} / {p.own:.2f}{' !' if p.parted else ''}" for p in c.positions)
    return [first, f"  accepted by position, there / here: {positions}"] if positions else [first]
