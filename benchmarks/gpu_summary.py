"""One page about what `gpu.sh` measured: `python -m benchmarks.gpu_summary FOLDER`.

Every goal with its figure, the tables that the steps wrote, and what failed. What is not there was not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHEET = 4.8e12  # bytes per second of an H200, as its data sheet says
SHEET_FLOPS = 989e12  # of its dense products in bfloat16
PASSES = {"passes-llama": "Llama-3.1-8B", "passes-qwen3": "Qwen3-8B", "compiled": "Llama-3.1-8B"}
PARTS = {
    "Ceilings": ["ceilings"],
    "Passes of the target": list(PASSES),
    "Ways of running passes that were tried": ["candidates"],
    "Decoding, batch 1": ["decode-llama", "decode-qwen3"],
    "Training of an EAGLE-3 head": ["training"],
    "Kernels against float64": ["kernels"],
}


class Results:
    """The files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """Return the result of a step; an empty one if there is none."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def tables(self, names: list[str]) -> Iterator[str]:
        """Yield what the steps wrote: tables, or a text."""
        for name in names:
            tables, text = (self.folder / f"{name}.{suffix}" for suffix in ("md", "txt"))
            if tables.exists():
                yield from (f"`{name}`:", "", tables.read_text().strip(), "")
            elif text.exists():
                yield from (f"    {line}" for line in text.read_text().splitlines())

    def failed(self) -> Iterator[str]:
        """Yield the failures, in a line each."""
        for file in sorted(self.folder.glob("*.failed")):
            lines = file.read_text().split("\n")
            yield f"- **{file.stem}**: {'; '.join(line.strip() for line in lines if line.strip())[:400]}"
        for name in PASSES:
            for runner, found in self.read(name).get("runners", {}).items():
                if "error" in found:
                    yield f"- **{name}, {runner}**: {found['error'][:300]}"


def goals(results: Results) -> Iterator[str]:
    """Yield each goal of the first light with its figure."""
    for name, shape in PASSES.items():
        found = results.read(name)
        for row in found.get("runners", {}).get("kernels", {}).get("passes", []):
            if row["context"] != 1024 and row["context"] >= 256:
                continue
            if row["tokens"] == 1:
                sheet = found.get("floor", {}).get("weight_bytes", 0) / SHEET / row["seconds"]
                share = f"{row['share_of_floor']:.1%} of the measured floor (goal: 80%)"
                yield f"- {shape}: plain pass {share}, {sheet:.1%} of the data sheet's"
            elif row["tokens"] in (8, 64):
                goal = 1.05 if row["tokens"] == 8 else 1.2
                yield f"- {shape}: T({row['tokens']})/T(1) {row['over_one_token']:.3f} (goal: at most {goal})"
    for name in ("decode-llama", "decode-qwen3"):
        for cell in results.read(name).get("cells", []):
            yield from _loop_goals(name.removeprefix("decode-"), cell)
    trained = results.read("training")
    best = max((row["mfu"] for row in trained.get("steps", []) if "mfu" in row), default=None)
    if best is not None:
        sheet = best * trained["conditions"]["flops_per_second_of_products"] / SHEET_FLOPS
        yield f"- training MFU {best:.1%} (goal: 40%), {sheet:.1%} of the data sheet's"


def _loop_goals(shape: str, cell: dict[str, Any]) -> Iterator[str]:
    loops = {loop: row for loop, row in cell.get("loops", {}).items() if isinstance(row, dict)}
    plain, generate = loops.get("plain"), loops.get("transformers.generate")
    speed, theirs = _speed(plain), _speed(generate)
    if speed and theirs:
        yield f"- {shape}: {speed / theirs:.2f} times `transformers.generate` (goal: 4)"
    one = (plain or {}).get("seconds_per_round")
    gap = (cell.get("gaps", {}).get("plain") or {}).get("between")
    if one and gap:
        yield f"- {shape}: host gap {gap / one:.1%} of a plain round, under the profiler (goal: below 3%)"
    drafted = loops.get("eagle3", {}).get("seconds_per_round")
    if one and drafted:
        yield f"- {shape}: an EAGLE-3 round of depth 4 is {drafted / one:.2f} plain rounds (goal: at most 1.35)"


def _speed(row: dict[str, Any] | None) -> float | None:
    if not row or "error" in row:
        return None
    return row.get("steady_tokens_per_second") or row.get("tokens_per_second")


def page(folder: Path) -> str:
    """Return the page."""
    results = Results(folder)
    parts = {"Goals": list(goals(results))} | {title: list(results.tables(names)) for title, names in PARTS.items()}
    lines = ["# First light"]
    for title, found in parts.items():
        lines += ["", f"## {title}", "", *(found or ["Not measured."])]
    lines += ["", "## What failed", "", *(list(results.failed()) or ["Nothing."])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
