"""Time and memory of reading data, and of writing the data set, against the amount of data.

    python -m outrider.scripts.bench.growth --out scripts/bench/results/growth-cpu.json

The embedded prompts once, 10 times and 100 times, each copy with its own number in front, so that no row is a
duplicate. Each amount is a process of its own: it reads the prompts as a recipe does (rendered, tokenized, compared to
the suites and to each other), then writes a data set of rows that are the prompts with 64 tokens after them, as
answers would be. Nothing is answered. Memory is the anonymous memory of the process (`RssAnon`: its own, without the
mapped file, of which the system takes back what it needs), its peak less what there was before the first row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.common.atomic import write_atomically
from outrider.common.machine import cpu_name
from outrider.common.versions import versions
from outrider.distill.collect import Collection, recipe_prompts
from outrider.distill.data_set import TrainingRow, save_data_set
from outrider.recipes import Recipe, embedded_file
from outrider.targets.loading import load_tokenizer_of

from .conditions import command, write

NAMES = ("code", "docs", "prose")
ANSWER = [7] * 64
MEGABYTE = 1e6


@dataclass
class Peak:
    """The most memory that was in use, bytes."""

    most: int = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Look at this process's memory a hundred times per second."""
    peak, end = Peak(own_memory()), threading.Event()

    def look() -> None:
        while not end.wait(0.01):
            peak.most = max(peak.most, own_memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        end.set()
        thread.join()


def own_memory() -> int:
    """Return the anonymous memory of this process, bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1000 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def grow(file: Path, factor: int) -> None:
    """Write the embedded prompts so many times, each copy's texts with its number in front."""
    rows = [row for name in NAMES for row in embedded_file(f"prompts/{name}.jsonl").read_text().splitlines()]
    copies = (_numbered(json.loads(row), copy) for copy in range(factor) for row in rows)
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in copies))


def _numbered(row: dict[str, Any], copy: int) -> dict[str, Any]:
    mark = f"# {copy}\n"
    if "text" in row:
        return {"text": mark + row["text"]}
    first, *rest = row["messages"]
    return {"messages": [{**first, "content": mark + first["content"]}, *rest]}


def measure(file: Path, place: Path) -> dict[str, Any]:
    """Return seconds and memory of reading `file` and of writing its data set."""
    tokenizer = load_tokenizer_of("embedded", None, False)
    data = {"prompts": [str(file)], "malformed": "refuse"}
    recipe = Recipe.from_dict({"name": "growth", "target": {"path": "embedded"}, "drafter": {}, "data": data})
    recipe_prompts(_few(recipe), tokenizer)  # the first time loads what is loaded once
    before = own_memory()
    with watched() as peak:
        began = time.perf_counter()
        found = recipe_prompts(recipe, tokenizer, folder=place)
        read = time.perf_counter()
        save(found, place, tokenizer)
        written = time.perf_counter()
    return {
        "rows": len(found.prompts),
        "tokens": int(found.prompts.lengths.sum()),  # type: ignore[attr-defined]
        "file_megabytes": file.stat().st_size / MEGABYTE,
        "read_seconds": read - began,
        "write_seconds": written - read,
        "memory_megabytes": (peak.most - before) / MEGABYTE,
        "memory_before_megabytes": before / MEGABYTE,
    }


def _few(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"limit": 100})})


def save(found: Collection, place: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a data set of the prompts with an answer each."""
    from outrider.distill.conversation import sequences

    rows = (
        TrainingRow(prompt.id, prompt.suite, *sequence, prompt.content)
        for prompt in found.prompts
        for sequence in sequences(prompt, [ANSWER], tokenizer)
    )
    save_data_set(place / "data", rows, place, dict, "growth")


def _in_a_process(factor: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        grow(file, factor)
        call = [sys.executable, "-m", "outrider.scripts.bench.growth", "--one", str(file)]
        done = subprocess.run(call, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{factor:>4}×: {found}", file=sys.stderr)
    return {"factor": factor, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one, arguments.one.parent)))
        return 0
    found = [_in_a_process(factor) for factor in arguments.factors]
    conditions = {
        "device_name": cpu_name(),
        "prompts": "embedded:code, docs and prose",
        "answer_tokens": len(ANSWER),
        "created": datetime.now(UTC).date().isoformat(),
        "versions": versions("outrider", "datasets", "tokenizers", "pyarrow"),
    }
    write({"conditions": conditions, "growth": found}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
