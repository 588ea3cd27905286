"""`outrider lab vocab`: from a recipe's responses to its pruned draft vocabularies, their reach and what each costs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import Tensor

from ..common.atomic import write_atomically
from ..common.digests import write_json
from ..common.locks import locked
from ..common.progress import progress
from ..distill import distill, load_responses
from ..eval.reports import plots
from ..eval.reports.figures import Interval
from ..eval.reports.render import fitted, print_table
from ..eval.reports.tables import Cell, Table
from ..heads import drafter_config
from ..recipes import Recipe
from ..targets import Target
from ..train.data import IGNORED, Rows, collate, split, token_counts
from .vocabulary_pruning import (
    Vocabulary,
    VocabularyReport,
    check_size,
    measure_pruning,
    ranks,
    size_figures,
    usual_sizes,
)

BATCH_SIZE = 8
_PATIENCE = 60.0  # seconds that a finished study waits for another one in the same folder


def study(
    recipe: Recipe,
    sizes: Sequence[int] = (),
    limit: int | None = None,
    target: Target | None = None,
    console: Console | None = None,
) -> VocabularyReport:
    """Count what the trainer counts, and measure on held-out responses (on the counted ones if none are held out).

    Args:
        sizes: beside the usual ones and the recipe's own.
        limit: sequences measured at most.
        target: used instead of loading the recipe's.

    Raises:
        BadInputError: a size that is none, or responses without a token to learn.
    """
    own = own_size(recipe)
    target = target or Target.load(**recipe.target.to_load())
    wanted = [size for size in (*sizes, own) if size]
    for size in wanted:
        check_size(size, target.vocab_size)
    table = load_responses(distill(recipe, target, console))
    counted, held_out = split(table, recipe.data.holdout)
    counts = token_counts(counted, target.vocab_size)
    made = {size: Vocabulary.of(counts, size) for size in (*wanted, *usual_sizes(target.vocab_size, wanted))}
    made = dict(sorted(made.items()))
    rows = Rows(table, (held_out if len(held_out) else counted).indices[:limit])
    sums, positions = measure_pruning(target, _batches(rows, console), ranks(counts), list(made))
    return VocabularyReport(
        recipe=recipe.name,
        target=str(recipe.target.path),
        vocab_size=target.vocab_size,
        counts_digest=hashlib.sha256(counts.numpy().astype("<i8").tobytes()).hexdigest(),
        num_counted=int(counts.sum()),
        num_distinct=int((counts > 0).sum()),
        measured_on="held-out responses" if len(held_out) else "the counted responses themselves",
        num_sequences=len(rows),
        num_positions=int(positions.sum()),
        sizes=size_figures(sums, positions, [(size, v.digest, v.coverage) for size, v in made.items()]),
        chosen=own or None,
        token_ids=made[own].token_ids.tolist() if own else None,
    )


def own_size(recipe: Recipe) -> int:
    """Return the size of the draft vocabulary that the recipe's drafter asks for; 0 for the whole one."""
    values = {k: v for k, v in recipe.drafter.items() if k != "init"}
    return int(getattr(drafter_config(values)[1], "draft_vocab_size", 0)) if "type" in values else 0


def _batches(rows: Rows, console: Console | None) -> Iterator[tuple[Tensor, Tensor]]:
    with progress(console, "the target's distribution", len(rows), transient=True) as advance:
        for begin in range(0, len(rows), BATCH_SIZE):
            batch = collate([rows[i] for i in range(begin, min(begin + BATCH_SIZE, len(rows)))])
            yield batch["input_ids"], batch["labels"] != IGNORED
            advance(len(batch["index"]), "")


def show(report: VocabularyReport, folder: Path, console: Console) -> None:
    """Print the curve as a table, under it the meaning of its columns, and where it was kept."""
    rows = [
        [
            Cell(f"{s.size:,}" + (" *" if s.size == report.chosen else "")),
            Cell(f"{s.counted:.4f}"),
            Cell(s.covered.main(4)),
            Cell.of(s.lost, 4),
            Cell(s.alpha_max.main(4)),
            Cell.of(s.lost_greedy, 4),
            Cell(s.digest[:12]),
        ]
        for s in report.sizes
    ]
    headers = ["tokens", "counted", "covered", "lost at 1", "alpha at most", "lost at 0", "digest"]
    print_table(fitted(Table("Draft vocabularies", headers, rows), console.width, ("digest", "counted")), None, console)
    star = "; * is the recipe's" if report.chosen else ""
    measured_on = report.measured_on if report.num_sequences else "responses"
    console.print(
        Text(
            f"counted: share of the {report.num_counted:,} response tokens counted ({report.num_distinct:,} different "
            f"ones of {report.vocab_size:,}); covered: the same of {report.num_positions:,} positions in "
            f"{report.num_sequences:,} {measured_on}, where the target's probability outside is what a perfect drafter "
            "loses at temperature 1, and its most probable token outside at temperature 0; "
            f"95% intervals over responses{star}.",
            style="dim",
        )
    )
    console.print(f"kept in [bold]{escape(str(folder))}[/bold]")


def _rest(lost: Interval) -> Interval:
    """Return the share that is left."""
    return Interval(1 - lost.value, 1 - lost.high, 1 - lost.low)


def save(report: VocabularyReport, folder: Path) -> Path:
    """Write vocabulary.json and vocabulary.svg, into a folder named after the counts; return that folder."""
    place = folder / report.counts_digest[:16]
    lines = {
        "response tokens covered": {f"{s.size:,}": s.covered for s in report.sizes},
        "acceptance of a perfect drafter at temperature 1": {f"{s.size:,}": s.alpha_max for s in report.sizes},
        "the same at temperature 0": {f"{s.size:,}": _rest(s.lost_greedy) for s in report.sizes},
    }
    least = min([0.9, *(share.lowest for line in lines.values() for share in line.values())])
    limits = math.floor(least * 10) / 10, 1.0
    title = f"Draft vocabularies of {report.recipe}"
    curves = plots.curves(title, "tokens of the draft vocabulary", lines, limits, "%")
    drawn = plots.standalone(curves)
    with locked(folder, wait=_PATIENCE):
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "vocabulary.svg", drawn)
        write_json(place / "vocabulary.json", json.loads(report.model_dump_json()), indent=1)
    return place
