"""`outrider lab gate`: the gate's verdict at the first prompt that allows one."""

from __future__ import annotations

from typing import Annotated

import typer

from ..scripts.measuring_cli import finish_gate
from ..scripts.options import AsJson, Baseline, Measured


def gate(
    pair: Measured,
    against: Baseline,
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="How far τ may fall, as a fraction.")] = 0.03,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999)] = 0.95,
    as_json: AsJson = False,
) -> None:
    """As `outrider gate`, but it looks after every prompt: exit code 1 if τ fell beyond the tolerance."""
    from ..pair import gate_folders
    from .sequential import judged_in_turn

    finish_gate(as_json, gate_folders(pair, against, tolerance, confidence, judged_in_turn))
