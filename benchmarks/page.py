"""The page of results and the index of result files, both made from those files.

    python -m benchmarks.page             # writes benchmarks/RESULTS.md and benchmarks/results/README.md
    python -m benchmarks.page --check     # writes nothing; exit code 1 if one of them is out of date

`tables.yaml` names the figures of each table by their paths in the JSON files. `results/notes.yaml` has a title and a
note for each file, and its date where the file has none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from outrider.common.atomic import write_atomically

from .report import NOTHING, interval, table

FOLDER = Path(__file__).parent
PAGE = "RESULTS.md"
INDEX = "results/README.md"
RECORDED = "not recorded"
NO_TARGET = "no target"
INDEX_OPENING = """# Result files

One line for each file: what it is about, target, machine, date. `python -m benchmarks.page` makes this index from the
files and `notes.yaml`, which has a note about each. [The ten tables](../RESULTS.md) show what users ask for.
"""


class Entry:
    """A result file and its note."""

    def __init__(self, file: Path, note: dict[str, str], targets: dict[str, str]):
        self.file = file
        self.result = json.loads(file.read_text(encoding="utf-8"))
        self.title = note.get("title", file.stem)
        self.note = note.get("note", "").strip()
        # In files about kernels the machine stands beside the figures.
        self.conditions: dict[str, Any] = self.result.get("conditions", self.result)
        date = self.result.get("created") or self.conditions.get("created") or note.get("date")
        self.date = str(date)[:10] if date else RECORDED
        self.target = note.get("target") or _target(self.conditions.get("target"), targets)

    def machine(self) -> str:
        """Return the processor or device as far as the file names it."""
        name = self.conditions.get("device_name") or f"{self.conditions.get('device', 'device')}, processor {RECORDED}"
        threads = self.conditions.get("threads")
        return name if threads is None else f"{name}, {threads} thread{'s' * (threads != 1)}"

    def line(self) -> str:
        """Return the conditions of the file's figures as one line of Markdown."""
        facts = [f"[`{self.file.name}`](results/{self.file.name})", self.target, self.machine()]
        facts += [str(self.conditions.get("dtype", "")), _prompts(self.conditions), self.date]
        return f"- {' · '.join(fact for fact in facts if fact)}. {self.note}".rstrip()

    def index_line(self) -> str:
        """Return the file's line in the index."""
        return (
            f"- [`{self.file.name}`]({self.file.name}): {self.title} · {self.target} · {self.machine()} · {self.date}"
        )


def _target(named: Any, targets: dict[str, str]) -> str:
    """Return a target by name: files know it by its path, by words, or by the digest of its fingerprint."""
    name = named.get("path", "") if isinstance(named, dict) else str(named or "")
    name = targets.get(name[:8], name)
    return "the embedded target alone" if name == "embedded" else name or NO_TARGET


def _prompts(conditions: dict[str, Any]) -> str:
    suites = conditions.get("suites") or []
    names = [suite["name"] if isinstance(suite, dict) else suite for suite in suites]
    prompts = conditions.get("prompts") or sum(s["num_prompts"] for s in suites if isinstance(s, dict))
    tokens = conditions.get("max_new_tokens")
    parts = [f"{prompts} prompts" if prompts else "", f"({', '.join(names)})" if names else ""]
    parts.append(f"of at most {tokens} new tokens" if tokens else "")
    return " ".join(part for part in parts if part)


def entries(folder: Path) -> dict[str, Entry]:
    """Return all results by name, in the order of the notes, those without a note last."""
    notes: dict[str, dict[str, str]] = _yaml(folder / "results/notes.yaml")
    targets = _yaml(folder / "tables.yaml")["targets"]
    order = {name: place for place, name in enumerate(notes)}
    files = sorted((folder / "results").glob("*.json"), key=lambda f: (order.get(f.stem, len(order)), f.stem))
    return {file.stem: Entry(file, notes.get(file.stem, {}), targets) for file in files}


def _yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def figure(result: Any, path: Iterable[Any], key: Any = None) -> Any:
    """Return what stands at a path of keys in a result.

    A mapping in the path chooses the one row of a list that has these values, and "$" stands for `key`.
    """
    for step in path:
        step = key if step == "$" else step
        if isinstance(step, dict):
            wanted = {name: key if value == "$" else value for name, value in step.items()}
            (result,) = [row for row in result if all(row[name] == value for name, value in wanted.items())]
        else:
            result = result[step]
    return result


def cell(result: Any, column: dict[str, Any], path: Any, key: Any) -> str:
    """Return one figure as its column shows it; `path` may ask for a share, a count or the least of many."""
    if path is None:
        return NOTHING
    if isinstance(path, str):
        return path
    if isinstance(path, dict) and "of" in path:  # so many of so many
        parts = [cell(result, {"digits": 0}, part, key) for part in path["of"]]
        return NOTHING if NOTHING in parts else " of ".join(parts)
    if isinstance(path, dict) and "count" in path:
        rows = figure(result, path["count"]).values()
        return str(sum(all(row[name] == value for name, value in path["where"].items()) for row in rows))
    if isinstance(path, dict):
        found = min(row[path["field"]] for row in figure(result, path["least"]).values())
    else:
        found = figure(result, path, key)
    if found is None or isinstance(found, str):
        return found or NOTHING
    digits, unit = column.get("digits", 2), column.get("unit", "")
    if isinstance(found, dict):
        value, *bounds = interval(found, digits, column.get("sign", "")).split(" ", 1)
        return " ".join([f"{value}{unit}", *bounds])
    return f"{found * column.get('times', 1):.{digits}f}{unit}"


def section(asked: dict[str, Any], results: dict[str, Entry]) -> str:
    """Return one table with its question, its answer, and the conditions of every file in it."""
    columns = asked["columns"]
    rows: list[list[str]] = []
    used: list[Entry] = []
    for group in asked["groups"]:
        entry = results[group["file"]]
        used.append(entry)
        paths = group.get("paths") or [column.get("path") for column in columns]
        for label, key in group["rows"].items():
            cells = [cell(entry.result, *pair, key) for pair in zip(columns, paths, strict=True)]
            rows.append([str(label), *cells, f"`{entry.file.name}`"])
    head = [asked["row"], *(column["name"] for column in columns), "file"]
    conditions = "\n".join(entry.line() for entry in dict.fromkeys(used))
    return "\n\n".join([f"## {asked['question']}", asked["answer"].strip(), table(head, rows), conditions])


def page(folder: Path) -> str:
    """Return the page of tables about the results in `folder`."""
    asked = _yaml(folder / "tables.yaml")
    results = entries(folder)
    sections = [section(one, results) for one in asked["tables"]]
    return "\n\n".join([asked["opening"].strip(), *sections]) + "\n"


def index(folder: Path) -> str:
    """Return the index of all result files in `folder`."""
    lines = [entry.index_line() for entry in entries(folder).values()]
    return "\n".join([INDEX_OPENING, *lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    only_check = parser.parse_args(arguments).check
    stale = []
    for name, made in ((PAGE, page(FOLDER)), (INDEX, index(FOLDER))):
        file = FOLDER / name
        if not only_check:
            write_atomically(file, made)
        elif not file.is_file() or file.read_text(encoding="utf-8") != made:
            stale.append(name)
    if stale:
        print(f"not what the result files hold: {', '.join(stale)}; run python -m benchmarks.page", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
