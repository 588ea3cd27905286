"""The mistakes that could explain an engine's acceptance, each tried on our own drafter, in our own decoder.

At temperature 0 a head drafts the same whenever it runs. So an engine that reads a head wrongly accepts, prompt by
prompt, exactly as many drafts as our decoder does with a head that was made wrong in the same way. `explain` turns that
into a likelihood: a mistake that is equal in all prompts leaves no doubt, and equal mistakes stay together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaln

from ..common.plugins import plugin, plugins
from ..heads import Drafter
from ..serving.engine_vs_decoder import FaultCandidate, ServedComparison, is_same
from ..serving.reference_run import DraftCounts, ServedAnswer

# The probability that a prompt is equal with the engine's own mistake: in float32 little but another order of sums,
# which decides a draft here and there, parts it from 1. And that two mistakes are equal where both are not the head's.
EQUAL = 0.98
EQUAL_IF_ROUNDED = 0.7
COINCIDENCE = 0.2
APART = 20.0  # times as probable as another candidate: only then are the two told apart

Made = Callable[[Any], Drafter | None]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, or in n-grams another choice.

    Attributes:
        says: its description, to be read after "suspect".
        made: returns a drafter with the mistake; None for one that cannot have it.
        kind: of the suspicion, see `serving.diagnosis.SUSPECTS`.
    """

    says: str
    made: Made
    kind: str = "first"


OWN, OTHER = "no mistake at all", "something that was not tried"


def explain(
    served: Sequence[DraftCounts],
    own: Sequence[ServedAnswer],
    tried: dict[str, list[ServedAnswer]],
    exact: bool = True,
) -> list[FaultCandidate]:
    """Return the candidates, the most probable ones first; [] if none was tried.

    Args:
        served: the engine's counts. own: the correct head's answers. tried: those of each mistaken head, by its name.
            All at temperature 0, prompt by prompt.
        exact: both sides compute in float32.
    """
    if not tried or not served:
        return []
    right = EQUAL if exact else EQUAL_IF_ROUNDED
    # Whatever breaks a drafter altogether is equal where nothing is accepted.
    chance = np.log([COINCIDENCE if c.accepted else 1.0 for c in served])
    equal = {name: np.array([*map(is_same, served, answers)]) for name, answers in {OWN: own, **tried}.items()}
    fits = {name: float(np.where(e, math.log(right), math.log(1 - right) + chance).sum()) for name, e in equal.items()}
    # What was not tried may part any share of the prompts from the right head. It, and no mistake, are beforehand as
    # probable as all that was tried together: of many mistakes that change little, one or the other fits by chance.
    same, parted = int(equal[OWN].sum()), ~equal[OWN]
    fits[OTHER] = math.log(len(tried)) + float(betaln(same + 1, parted.sum() + 1) + chance[parted].sum())
    fits[OWN] += math.log(len(tried))
    known = {name: one for kind in plugins("mistakes").values() for name, one in kind.items()}
    highest, candidates = max(fits.values()), dict[str, FaultCandidate]()
    for name, fit in sorted(fits.items(), key=lambda item: -item[1]):
        says, kind = (known[name].says, known[name].kind) if name in known else (name, "")
        count = int(equal[name].sum()) if name in equal else None
        # Of mistakes that differ in a number alone, the best one.
        candidates.setdefault(says, FaultCandidate(says=says, kind=kind, odds=math.exp(fit - highest), same=count))
    return list(candidates.values())


def described(compared: ServedComparison, place: str, suspects: str) -> tuple[str, str]:
    """Return the kind of fault in the drafts, and its suspects: the mistakes that cannot be told apart.

    Args:
        place: the kind without any mistake tried. suspects: its usual causes.
    """
    candidates = compared.candidates
    likely = together(candidates)
    nearest = next(c for c in candidates if c.says != OTHER)
    equal = f"the same drafts in {nearest.same} of {compared.identical} prompts"
    if nearest not in likely or nearest.says == OWN:
        none = f"None of the {len(candidates) - 2} mistakes that were tried does the same: the nearest is"
        return place, f"{suspects}. {none} {nearest.says}, {equal}"
    if len(likely) == 1:
        return nearest.kind, f"{nearest.says}: with that mistake our decoder accepts {equal}"
    known = [c.says for c in likely if c.says != OTHER] + [c.says for c in likely if c.says == OTHER]
    return nearest.kind, f"one of these, which cannot be told apart here ({equal}): {'; '.join(known)}"


def together(candidates: Sequence[FaultCandidate]) -> list[FaultCandidate]:
    """Return those that the engine's counts cannot tell from the most probable one, which is the first."""
    return [c for c in candidates if c.odds * APART >= 1]


def mistaken(drafter: Drafter) -> Iterator[tuple[str, Drafter]]:
    """Yield the drafter with each mistake that it can have; nothing for drafters of which no mistakes are known.

    Packages register the mistakes of a drafter by its name, under `outrider.mistakes`.
    """
    hypotheses: Mapping[str, Hypothesis] = plugin("mistakes", drafter.name) or {}
    for name, hypothesis in hypotheses.items():
        if (made := hypothesis.made(drafter)) is not None:
            yield name, made
