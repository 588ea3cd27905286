"""One page about what `gpu.sh` measured: `python -m benchmarks.gpu_summary FOLDER`.

Every goal with its figure, and what failed. What is not there was not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHEET = 4.8e12  # bytes per second of an H200, as its data sheet says
SHEET_FLOPS = 989e12  # of its dense products in bfloat16
FILES = {"passes-llama": "Llama-3.1-8B", "passes-qwen3": "Qwen3-8B", "compiled": "Llama-3.1-8B"}


class Results:
    """The files of a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """Return the result of a step; an empty one if there is none."""
        file = self.folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def failed(self) -> Iterator[str]:
        """Yield the failures, in a line each."""
        for file in sorted(self.folder.glob("*.failed")):
            lines = file.read_text().split("\n")
            yield f"- **{file.stem}**: {'; '.join(line.strip() for line in lines if line.strip())[:400]}"
        for name in FILES:
            for runner, found in self.read(name).get("runners", {}).items():
                if "error" in found:
                    yield f"- **{name}, {runner}**: {found['error'][:300]}"


def ceilings(results: Results) -> Iterator[str]:
    found = results.read("ceilings")
    if found:
        read, copied = (found[f"{what}_bytes_per_second"] / 1e12 for what in ("read", "copy"))
        yield (
            f"{found['device_name']}: reads {read:.3f} TB/s, copies {copied:.3f} TB/s, multiplies "
            f"{found['product_flops_per_second'] / 1e12:.1f} TFLOP/s (bfloat16), launches in a graph every "
            f"{1e6 * found['launch_seconds']:.2f} µs."
        )


def passes(results: Results) -> Iterator[str]:
    yield "| target, runner, context | T(1), ms | of the floor measured / data sheet | T(8)/T(1) | T(64)/T(1) |"
    yield "|---|---|---|---|---|"
    for name, shape in FILES.items():
        found = results.read(name)
        weights = found.get("floor", {}).get("weight_bytes", 0)
        for runner, measured in found.get("runners", {}).items():
            rows = measured.get("passes", [])
            for context in dict.fromkeys(row["context"] for row in rows):
                by_tokens = {row["tokens"]: row for row in rows if row["context"] == context}
                one = by_tokens[1]
                wide = [f"{by_tokens[n]['over_one_token']:.3f}" if n in by_tokens else "-" for n in (8, 64)]
                sheet = weights / SHEET / one["seconds"]
                yield (
                    f"| {shape}, {runner}, {context} | {1e3 * one['seconds']:.3f} | {one['share_of_floor']:.1%} / "
                    f"{sheet:.1%} | {wide[0]} | {wide[1]} |"
                )


def candidates(results: Results) -> Iterator[str]:
    file = results.folder / "candidates.txt"
    yield from (f"    {line}" for line in (file.read_text().splitlines() if file.exists() else ()))


def decoding(results: Results) -> Iterator[str]:
    yield "| target, loop | tokens/s | over plain | over generate | between rounds, ms | of the round |"
    yield "|---|---|---|---|---|---|"
    for name in ("decode-llama", "decode-qwen3"):
        for cell in results.read(name).get("cells", []):
            loops = {loop: row for loop, row in cell.get("loops", {}).items() if isinstance(row, dict)}
            plain, generate = (_speed(loops.get(key)) for key in ("plain", "transformers.generate"))
            for loop, row in loops.items():
                if (speed := _speed(row)) is not None:
                    gap = (cell.get("gaps", {}).get(loop) or {}).get("between")
                    seconds = row.get("seconds_per_round")
                    share = f"{gap / seconds:.1%}" if gap and seconds else "-"
                    yield (
                        f"| {name.removeprefix('decode-')}, {loop} | {speed:.1f} | {_over(speed, plain)} | "
                        f"{_over(speed, generate)} | {f'{1e3 * gap:.3f}' if gap else '-'} | {share} |"
                    )


def _speed(row: dict[str, Any] | None) -> float | None:
    if not row or "error" in row:
        return None
    return row.get("steady_tokens_per_second") or row.get("tokens_per_second")


def _over(speed: float, other: float | None) -> str:
    return "-" if not other else f"{speed / other:.2f}×"


def training(results: Results) -> Iterator[str]:
    found = results.read("training")
    if not found:
        return
    rate = found["conditions"]["flops_per_second_of_products"]
    yield "| length | chunk | tokens/s | MFU of measured / data sheet | peak, GiB |"
    yield "|---|---|---|---|---|"
    for row in found["steps"]:
        if "error" in row:
            yield f"| {row['length']} | {row['chunk']} | out of memory | | |"
            continue
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        yield (
            f"| {row['length']} | {row['chunk']} | {row['tokens_per_second']:.0f} | {row['mfu']:.1%} / "
            f"{row['mfu'] * rate / SHEET_FLOPS:.1%} | {peak} |"
        )


def kernels(results: Results) -> Iterator[str]:
    found = results.read("kernels")
    for dtype in ("bfloat16", "float32"):
        for kernel, error in found.get(dtype, {}).get("largest", {}).items():
            yield f"- {kernel}, {dtype}: largest relative error {error:.2g}"


def goals(results: Results) -> Iterator[str]:
    """Yield each goal of the first light with its figure."""
    fast = [
        (shape, row)
        for name, shape in FILES.items()
        for row in results.read(name).get("runners", {}).get("kernels", {}).get("passes", [])
        if row["context"] == 1024 or row["context"] < 256
    ]
    for shape, row in fast:
        if row["tokens"] == 1:
            yield f"- {shape}: plain pass {row['share_of_floor']:.1%} of the measured floor (goal: 80%)"
        elif row["tokens"] in (8, 64):
            goal = 1.05 if row["tokens"] == 8 else 1.2
            yield f"- {shape}: T({row['tokens']})/T(1) {row['over_one_token']:.3f} (goal: at most {goal})"
    for name in ("decode-llama", "decode-qwen3"):
        for cell in results.read(name).get("cells", []):
            yield from _loop_goals(name.removeprefix("decode-"), cell)
    best = max((row["mfu"] for row in results.read("training").get("steps", []) if "mfu" in row), default=None)
    if best is not None:
        yield f"- training MFU {best:.1%} (goal: 40%)"


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


PARTS = {
    "Goals": goals,
    "Ceilings": ceilings,
    "Passes of the target": passes,
    "Ways of running passes that were tried": candidates,
    "Decoding, batch 1": decoding,
    "Training of an EAGLE-3 head": training,
    "Kernels against float64": kernels,
}


def rows(lines: list[str]) -> list[str]:
    """Return a part's lines; nothing, if they are the head of an empty table."""
    return [] if len(lines) == 2 and lines[1].startswith("|---") else lines


def page(folder: Path) -> str:
    """Return the page."""
    results, lines = Results(folder), ["# First light"]
    for title, part in PARTS.items():
        lines += ["", f"## {title}", "", *(rows(list(part(results))) or ["Not measured."])]
    lines += ["", "## What failed", "", *(list(results.failed()) or ["Nothing."])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
