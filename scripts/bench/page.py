"""One page of all saved results, each figure with its file, its machine and its date.

    python -m outrider.scripts.bench.page             # writes scripts/bench/RESULTS.md
    python -m outrider.scripts.bench.page --check     # only says whether that page is up to date

It reads the JSON files in `results/`, and `results/notes.yaml` for what a measurement is about. A file that does not
say when it was made has its date there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from ...common.atomic import write_atomically
from .page_cells import Result, table
from .page_tables import tables_of

FOLDER = Path(__file__).parent
PAGE = "RESULTS.md"
RECORDED = "not recorded"
# Conditions that stand in the first line of a section, or say nothing about the figures.
ELSEWHERE = {
    "target",
    "dtype",
    "device",
    "device_name",
    "threads",
    "versions",
    "torch",
    "confidence",
    "resamples",
    "cells",
    "products",
    "created",
}
OPENING = """# Results

Everything that was measured of Outrider and kept. `python -m outrider.scripts.bench.page` makes this page from the
files in `scripts/bench/results/`; do not edit it by hand.

τ is the mean number of tokens per round, the target's own token included. Speedup is tokens per second over those of
the plain target in the same engine and the same run. [low, high] are 95% intervals. T is the temperature.
"""
NO_GPU = "Nothing here was measured on a GPU.\n"


class Entry:
    """A result file, with what `notes.yaml` says about it."""

    def __init__(self, file: Path, note: dict[str, str]):
        self.file, self.result = file, json.loads(file.read_text(encoding="utf-8"))
        self.title = note.get("title", file.stem)
        self.note = note.get("note", "").strip()
        date = self.result.get("created") or self.conditions.get("created") or note.get("date")
        self.date = str(date)[:10] if date else RECORDED

    @property
    def conditions(self) -> Result:
        """What a file says of the run; of kernels it stands beside the figures."""
        beside = {name: value for name, value in self.result.items() if name in ("device", "device_name", "versions")}
        return self.result.get("conditions", beside)

    def machine(self) -> str:
        """Return the processor or device as far as the file names it."""
        name = self.conditions.get("device_name") or f"{self.conditions.get('device', 'device')}, processor {RECORDED}"
        threads = self.conditions.get("threads")
        return name if threads is None else f"{name}, {threads} thread{'s' * (threads != 1)}"

    def software(self) -> str:
        versions = self.conditions.get("versions") or {k: v for k, v in self.conditions.items() if k == "torch"}
        return ", ".join(f"{name} {version}" for name, version in versions.items()) or RECORDED

    def section(self) -> str:
        """Return the whole section as Markdown."""
        dtype = self.conditions.get("dtype", "")
        opening = f"`{self.file.name}` · {self.date} · {self.machine()} · {dtype} · {self.software()}"
        parts = [f"## {self.title}", opening, self.note, f"Conditions: {self._settings()}.", *tables_of(self.result)]
        return "\n\n".join(part for part in parts if part)

    def _settings(self) -> str:
        kept = {k: v for k, v in self.conditions.items() if k not in ELSEWHERE and v is not None and v != []}
        return "; ".join(f"{name.replace('_', ' ')}: {_short(value)}" for name, value in kept.items())


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_short(item) for item in value)
    if isinstance(value, dict):
        known = value.get("name"), value.get("num_prompts")
        return f"{known[0]} ({known[1]})" if all(known) else ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    return str(value)


def entries(folder: Path) -> list[Entry]:
    """Return all results in the order of the notes, those without a note last."""
    notes: dict[str, dict[str, str]] = yaml.safe_load((folder / "notes.yaml").read_text(encoding="utf-8"))
    order = {name: place for place, name in enumerate(notes)}
    files = sorted(folder.glob("*.json"), key=lambda file: (order.get(file.stem, len(order)), file.stem))
    return [Entry(file, notes.get(file.stem, {})) for file in files]


def page(folder: Path) -> str:
    """Return the page about the results in `folder`."""
    found = entries(folder)
    rows = [[f"[{e.title}](#{_anchor(e.title)})", f"`{e.file.name}`", e.machine(), e.date] for e in found]
    overview = table(["what", "file", "machine", "date"], rows)
    opening = OPENING if any(e.conditions.get("device") != "cpu" for e in found) else f"{OPENING}{NO_GPU}"
    return "\n".join([opening, overview, "", "\n\n".join(e.section() for e in found), ""])


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    file, made = FOLDER / PAGE, page(FOLDER / "results")
    if not parser.parse_args(arguments).check:
        write_atomically(file, made)
    elif not file.is_file() or file.read_text(encoding="utf-8") != made:
        print(f"{PAGE} is not what the result files say: run python -m outrider.scripts.bench.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
