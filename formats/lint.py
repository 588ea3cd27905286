"""Lint: what is wrong, or unusual, in a drafter's files, and what an engine would do with it. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from . import block_checks, checks, eagle_checks
from .checkpoint_view import LintFinding, Look
from .import_ import nonsense_explained, recognised

# Every check is asked of every checkpoint; one that does not concern a layout finds nothing in it.
CHECKS: tuple[Callable[[Look], Iterator[LintFinding]], ...] = (
    checks.numbers,
    checks.initial,
    checks.names_and_shapes,
    checks.frequencies,
    checks.changed_tensors,
    checks.changed_config,
    checks.depths,
    checks.rope,
    checks.embeddings,
    eagle_checks.taps,
    eagle_checks.norm_flags,
    eagle_checks.vocabulary,
    eagle_checks.tied,
    block_checks.taps,
    block_checks.target_layers,
    block_checks.mask,
    block_checks.slots,
    block_checks.architecture,
    block_checks.heads,
)


def lint(folder: str | Path, target: str | None = None) -> list[LintFinding]:
    """Return what is wrong in the drafter's files in `folder`, faults first; [] for nothing.

    Args:
        target: the target's folder; None takes the one that the files name, if it is on this machine.

    Raises:
        BadInputError: there is no checkpoint in a known layout, or its files cannot be read.
    """
    folder = Path(folder).expanduser()
    if not any(folder.glob("*.safetensors")) and (pickled := list(checks.pickles(folder))):
        return pickled
    layout = recognised(folder)
    with nonsense_explained(folder):
        look = Look.at(folder, layout, target)
        findings = [*checks.pickles(folder), *(finding for check in CHECKS for finding in check(look))]
    return sorted(findings, key=lambda finding: not finding.is_fault)
