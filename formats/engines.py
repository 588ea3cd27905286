"""Which engine serves which drafter: in which layout, and started how.

Engines count drafts differently. vLLM's `num_speculative_tokens` is our depth. SGLang has steps, children of a node and
tokens that are verified, the root included: depth, 1 and depth + 1.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from ..ground import BadInputError, IncompatibleError
from ..heads import DrafterConfig
from .layout import Lack, Layout, refuse_lacks
from .speculators import Speculators

# What can be written for whom: `--to`, our drafter, and the layout.
LAYOUTS: dict[str, dict[str, Layout]] = {
    "vllm": {"eagle3": Speculators(embeddings=False)},
    "speculators": {"eagle3": Speculators()},
}


@dataclass(frozen=True)
class Launch:
    """How an engine is started with an export.

    Attributes:
        engine: its name.
        command: one line for a shell; None for a layout that several programs read.
        settings: the part of it that configures drafting, as the engine takes it.
    """

    engine: str
    command: str | None
    settings: dict[str, Any]


def layout_of(to: str, drafter: str) -> Layout:
    """Return the layout of a drafter of this type for `to`.

    Raises:
        BadInputError: nobody knows `to`.
        IncompatibleError: it has no layout for this type; what it has is named.
    """
    if to not in LAYOUTS:
        raise BadInputError(f"unknown format or engine {to!r}; known: {', '.join(LAYOUTS)}.")
    if drafter not in LAYOUTS[to]:
        others = [name for name, layouts in LAYOUTS.items() if drafter in layouts]
        elsewhere = f"; {drafter} drafters can go to: {', '.join(others)}" if others else ""
        raise IncompatibleError(f"{to} serves no {drafter} drafter; it serves: {', '.join(LAYOUTS[to])}{elsewhere}.")
    return LAYOUTS[to][drafter]


def require_served(to: str, drafter: str, config: DrafterConfig, num_layers: int) -> Layout:
    """Return the layout of a drafter for `to`, if it can serve one with these settings.

    Raises:
        BadInputError, IncompatibleError: as `layout_of`, or a setting that cannot be served, with the nearest that can.
    """
    layout = layout_of(to, drafter)
    refuse_lacks(layout.lacks(config, num_layers), to)
    return layout


def lacks(to: str, drafter: str, config: DrafterConfig, num_layers: int) -> list[Lack]:
    """Return what of a drafter's settings `to` cannot serve."""
    return layout_of(to, drafter).lacks(config, num_layers)


# ------------------------------------------------------------ how they are started


def launch(to: str, drafter: str, target: str, folder: str, depth: int) -> Launch:
    """Return how `to` is started with a drafter of this type.

    Args:
        target: the target's path or Hub id, as the engine will find it.
        folder: the export's.
        depth: draft tokens of a round, in our counting.
    """
    if to == "vllm":
        return _vllm(drafter, target, folder, depth)
    return Launch(to, None, {"depth": depth})


# What vLLM calls our drafters.
_VLLM_METHODS = {"eagle3": "eagle3"}


def _vllm(drafter: str, target: str, folder: str, depth: int) -> Launch:
    # Without "probabilistic" the drafts above temperature 0 are greedy, and a third of what drafting gains is lost.
    settings = {
        "method": _VLLM_METHODS[drafter],
        "model": folder,
        "num_speculative_tokens": depth,
        "draft_sample_method": "probabilistic",
    }
    words = ["vllm", "serve", target, "--speculative-config", json.dumps(settings)]
    return Launch("vllm", shlex.join(words), settings)
