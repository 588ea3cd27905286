"""Drafters out: written in an engine's layout, read back as that engine reads it, and compared."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ..common import BadInputError, IncompatibleError
from ..common.atomic import replacing_folder
from ..common.errors import did_you_mean
from ..common.places import require_new
from ..heads import Drafter
from ..targets import Target
from .base_layout import write_record
from .engine_logits import difference, outputs_in_float32, passage_of, require_same, session_logits
from .engines import require_served
from .lint import faults_of_writing

PLAIN_PRECISIONS = ("f32", "f16", "bf16")  # of those that layouts have; all others quantise

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """A drafter that was written for an engine.

    Attributes:
        layout: the name of its layout.
        difference: the largest difference between its logits, as the engine reads the files, and the drafter's own, in
            units of their spread; of a drafter that was rounded first, its own are those after that.
        rounding: the same between the drafter before it was rounded and after; 0 for one that was not.
        precision: that its matrices were rounded to; "" for their own.
    """

    folder: Path
    layout: str
    difference: float
    rounding: float = 0.0
    precision: str = ""


def export_drafter(
    drafter: Drafter, target: Target, to: str, folder: str | Path, depth: int, precision: str = ""
) -> Exported:
    """Write `drafter` for `to` into `folder`, which must be new or empty.

    Args:
        to: an engine or a format, see `engines.LAYOUTS`.
        depth: draft tokens of a round, for an engine that is told nothing else.
        precision: of its matrices, one that the layout has; "" for their own.

    Raises:
        BadInputError: an unknown format or precision, or a folder that is not empty.
        IncompatibleError: the drafter uses what the engine lacks (with the nearest setting that it serves), or the
            files, read back, give other logits than the drafter.
    """
    final = Path(folder).expanduser()
    require_new(final)
    with replacing_folder(final) as partial:
        written = write_drafter(drafter, target, to, partial, depth, precision)
    return replace(written, folder=final)


def write_drafter(drafter: Drafter, target: Target, to: str, folder: Path, depth: int, precision: str = "") -> Exported:
    """Return the export of `drafter` for `to`, written into an empty folder that is not visible yet.

    Raises as `export_drafter` does.
    """
    layout = require_served(to, drafter.name, drafter.config, target.num_layers)
    limit = getattr(drafter.config, "max_position_embeddings", 0)
    if limit and target.max_context is not None and limit < target.max_context:
        _log.warning(
            "the drafter's max_position_embeddings is %d, the target's context %d: beyond %d tokens an engine's drafts "
            "are wrong (vLLM: token 0), and nothing says so.",
            limit,
            target.max_context,
            limit,
        )
    if (window := getattr(drafter.config, "sliding_window", 0)) and not layout.keeps_window:
        _log.warning(
            "%s has no sliding window for this drafter: beyond %d tokens its drafts are others than were measured.",
            to,
            window,
        )
    if getattr(drafter.config, "temperatures", ()):
        _log.warning("%s has no place for the temperatures of confidences: an engine's are not calibrated.", to)
    passage = passage_of(target, drafter.max_depth)
    given, drafter = drafter, rounded(drafter, target, to, depth, precision)
    layout.save_as(given, target, folder, depth, precision)
    written = layout.load(folder)
    write_record(folder, written, layout.name)
    for found in faults_of_writing(written, layout):
        raise IncompatibleError(f"{drafter.name} for {to}: {found} Nothing was written; please report it.")
    with outputs_in_float32(target):
        theirs = layout.logits(written, target, passage)
        own = session_logits(drafter, target, passage)
        moved = difference(session_logits(given, target, passage), own) if precision else 0.0
    apart = require_same(own, theirs, f"{drafter.name} for {to}")
    return Exported(folder, layout.name, apart, moved, precision)


def rounded(drafter: Drafter, target: Target, to: str, depth: int, precision: str) -> Drafter:
    """Return the drafter that an export in this precision holds; "" is its own.

    Raises BadInputError or IncompatibleError: as `export_drafter` does, for another precision than the layout has.
    """
    layout = require_served(to, drafter.name, drafter.config, target.num_layers)
    if not precision:
        return drafter
    if not layout.precisions:
        raise IncompatibleError(
            f"{to} takes {drafter.name} drafters ({layout.name}) in their own precision alone, not in {precision}."
        )
    if precision not in layout.precisions:
        meant, known = did_you_mean(precision, layout.precisions), ", ".join(layout.precisions)
        raise BadInputError(
            f"{layout.name} has no precision {precision!r}; {meant}it has: {known}.{layout.other_precisions}"
        )
    made: Drafter = layout.rounded(drafter, target, depth, precision)
    return made.to(target.device).eval()
