"""The support matrix: which drafter goes to which engine, and how far that was proven.

*Served*: a real build drafted with it on our machines, by a result file of `benchmarks/results`. *Read back*: what is
written is read as the engine's source reads it, and compared with the drafter. *No*: with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .engines import LAYOUTS

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp", "hf": "transformers"}


@dataclass(frozen=True)
class ServedHere:
    """A real engine that drafted with an export.

    Attributes:
        file: of `benchmarks/results`, without its ending. row: of its table.
        there, here: τ at temperature 0 of the engine and of our decoder, as the file has them; of the embedded target.
    """

    build: str
    date: str
    file: str
    row: str
    there: float
    here: float

    def __str__(self) -> str:
        return f"{self.build}, {self.date}: τ {self.there:.3f} there, {self.here:.3f} here"


_VLLM = ("vLLM 0.32, CPU, mended", "2026-11-22")  # faults of that build put right (`tests/serving/cured`)
SERVED = {
    ("vllm", "eagle3"): ServedHere(*_VLLM, "served-cpu-fp32", "eagle3", 1.990, 1.990),
    ("vllm", "eagle1"): ServedHere(*_VLLM, "served-cpu-fp32", "eagle1", 1.541, 1.541),
    ("vllm", "draft_model"): ServedHere(*_VLLM, "served-cpu-fp32", "draft_model", 1.885, 1.885),
    ("vllm", "medusa"): ServedHere(*_VLLM, "served-variants-cpu-fp32", "medusa", 1.553, 1.553),
    ("vllm", "mtp"): ServedHere(*_VLLM, "served-mtp-cpu-fp32", "mtp", 1.299, 1.299),
    ("vllm", "dflash"): ServedHere(*_VLLM, "served-blocks-cpu-fp32", "dflash", 1.605, 1.605),
    ("vllm", "tli"): ServedHere("vLLM 0.32, CPU", "2026-11-30", "served-tli-cpu-fp32", "tli", 1.101, 1.101),
    ("gguf", "eagle3"): ServedHere(
        "llama.cpp 11549, CPU", "2026-11-29", "served-llama-heads-cpu-fp32", "eagle3", 2.210, 2.210
    ),
    ("gguf", "dflash"): ServedHere(
        "llama.cpp 11549, CPU", "2026-11-30", "served-llama-dflash-150s-cpu-fp32", "dflash", 1.514, 1.514
    ),
    ("gguf", "draft_model"): ServedHere(
        "llama.cpp 11434, CPU", "2026-11-22", "served-llama-cpu-fp32", "draft_model", 1.870, 1.873
    ),
}
# The same for drafters whose matrices were quantised, in bfloat16: near ties of the target's may fall otherwise there.
QUANTISED = {
    ("vllm", "eagle3", "w4a16"): ServedHere(
        "vLLM 0.32, CPU, bfloat16", "2026-11-30", "quantised-heads-cpu", "eagle3 w4a16", 2.022, 2.030
    ),
}
_UNWRITTEN = "11434 reads it, and its converter writes it of other layouts; not written here yet"
# Why an engine gets no such drafter, where more is known than that it names none.
REASONS = {
    **dict.fromkeys([("gguf", name) for name in ("mtp", "dflash2", "dspark")], _UNWRITTEN),
    ("sglang", "medusa"): "no Medusa model there",
    ("hf", "mtp"): "transformers drafts with the MTP of a few families by itself",
}
_NO_LAYOUT = "no layout of its own here"


@dataclass(frozen=True)
class Support:
    """What is known of one drafter in one engine."""

    drafter: str
    engine: str
    level: Literal["served", "read back", "no"]
    layout: str  # "" without one
    said: str


def support() -> list[Support]:
    """Return the matrix: for every drafter that can leave, every engine."""
    drafters = dict.fromkeys(kind for layouts in LAYOUTS.values() for kind in layouts)
    return [support_of(kind, engine) for kind in drafters for engine in ENGINES]


def support_of(kind: str, engine: str) -> Support:
    """Return what is known of drafters of a type in an engine."""
    layout = LAYOUTS[engine].get(kind)
    if layout is None:
        others = [to for to, layouts in LAYOUTS.items() if kind in layouts and to not in ENGINES]
        elsewhere = f"; files for others: {', '.join(others)}" if others else ""
        return Support(kind, engine, "no", "", REASONS.get((engine, kind), _NO_LAYOUT) + elsewhere)
    more = f"; also in {', '.join(layout.precisions)}" if layout.precisions else ""
    if (served := SERVED.get((engine, kind))) is None:
        return Support(kind, engine, "read back", layout.name, f"by the engine's source, not by the engine{more}")
    return Support(kind, engine, "served", layout.name, f"{served}{more}")


def table() -> str:
    """Return the matrix in Markdown, a drafter a line, and below it what was served."""
    cells = {(one.drafter, one.engine): one for one in support()}
    lines = [f"| drafter | {' | '.join(ENGINES.values())} |", "|---" * (len(ENGINES) + 1) + "|"]
    for kind in dict.fromkeys(kind for kind, _ in cells):
        lines.append(f"| {kind} | {' | '.join(_cell(cells[kind, engine]) for engine in ENGINES)} |")
    lines.append("")
    for engine, layouts in ((one, LAYOUTS[one]) for one in ENGINES):
        for known in dict.fromkeys(tuple(layout.precisions) for layout in layouts.values() if layout.precisions):
            kinds = [kind for kind, layout in layouts.items() if tuple(layout.precisions) == known]
            lines.append(f"- {ENGINES[engine]}, {', '.join(kinds)}: with `--precision` in {', '.join(known)}.")
    for (engine, kind, precision), served in QUANTISED.items():
        lines.append(f"- {ENGINES[engine]}, {kind} in {precision}: **served** ({served}).")
    why = dict.fromkeys((ENGINES[engine], reason) for (engine, _), reason in REASONS.items())
    for name, reason in why:
        kinds = [kind for (engine, kind), said in REASONS.items() if (ENGINES[engine], said) == (name, reason)]
        lines.append(f"- {name}, {', '.join(kinds)}: {reason}.")
    return "\n".join([*lines, ""])


def _cell(one: Support) -> str:
    return f"**served** ({SERVED[one.engine, one.drafter]})" if one.level == "served" else one.level
