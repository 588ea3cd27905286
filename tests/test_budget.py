"""The budget of the house: lines by room, files by journey, and habits. A change that needs more raises a number here,
with its reason in docs/developers/decisions.md.

    python tests/test_budget.py      # the table, as CI prints it
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

HOUSE = Path(__file__).parents[1]
LAB = "lab"
# Lines of Python in each room. The kernel's goal is 40,000 in all; it is not reached yet.
ROOMS = {
    "common": 3325,
    "targets": 7900,
    "heads": 7645,
    "formats": 4610,
    "decode": 4020,
    "recipes": 810,
    "distill": 5230,
    "costs": 1210,
    "eval": 4870,
    "train": 4675,
    "pair": 3580,
    "serving": 2475,
    "scripts": 4260,
    LAB: 10_790,
}
OTHERS = {"tests": 56_270, "benchmarks": 3925}
# Habits that grow unnoticed, in kernel and lab together.
HABITS = {
    "functions of more than 60 lines": 6,
    "imports inside functions, outside the command line": 26,
    "Any": 754,
    "assignments of three values or more": 0,
}
# Files of ours that run in one round of an EAGLE-3 chain, and in one of its training steps. The goals are 8 and 5.
JOURNEYS = {"a token": 15, "a training step": 5}


def python_files(folder: str) -> Iterator[Path]:
    return (file for file in sorted((HOUSE / folder).rglob("*.py")) if ".venv" not in file.parts)


def num_lines(folder: str) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in python_files(folder))


def trees() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for file in python_files(room):
            yield room, ast.parse(file.read_text(encoding="utf-8"))


def habits() -> dict[str, int]:
    """Return how often each habit stands in kernel and lab."""
    found = dict.fromkeys(HABITS, 0)
    for room, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "Any":
                found["Any"] += 1
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = node.targets[0]
                found["assignments of three values or more"] += isinstance(names, ast.Tuple) and len(names.elts) > 2
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                found["functions of more than 60 lines"] += node.end_lineno - node.lineno >= 60
                if room not in ("scripts", LAB):
                    inner = (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))
                    found["imports inside functions, outside the command line"] += len(list(inner))
    return found


def files_run_by(work: Callable[[], Any]) -> set[str]:
    """Return the files of ours whose functions run meanwhile."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    rooms = {str(HOUSE / room) for room in ROOMS}
    return {name.removeprefix(f"{HOUSE}/") for name in seen if any(name.startswith(f"{room}/") for room in rooms)}


@pytest.mark.parametrize("room", [*ROOMS, *OTHERS])
def test_a_room_has_no_more_lines_than_it_is_granted(room: str) -> None:
    assert num_lines(room) <= (ROOMS | OTHERS)[room], "raise it with a reason in decisions.md, or write less"


def test_habits_do_not_grow() -> None:
    found = habits()
    assert {name: count for name, count in found.items() if count > HABITS[name]} == {}


def test_a_token_and_a_training_step_pass_through_few_files(tiny_target: Any) -> None:
    import torch

    from outrider.decode import Decoder, Plan
    from outrider.heads import TargetBatch, drafter_config

    head, config = drafter_config({"type": "eagle3", "steps": 3, "taps": [1, 3, 5]})
    drafter = head.build(config, tiny_target)
    tokens = torch.randint(0, 60, (2, 12))
    out = tiny_target.forward(tokens, taps=drafter.taps)
    batch = TargetBatch(tiny_target, tokens, torch.ones_like(tokens, dtype=torch.bool), out.hidden, out.last)
    found = {"a training step": files_run_by(lambda: drafter.loss(batch).mean.backward())}
    running = Decoder(tiny_target, drafter).stream([5, 6, 7], 24, plan=Plan(3))
    for _ in range(3):
        next(running)
    found["a token"] = files_run_by(lambda: next(running))
    assert {name: sorted(files) for name, files in found.items() if len(files) > JOURNEYS[name]} == {}


def table() -> str:
    """Return the budget as a table: what there is, and what is granted."""
    rows = [(name, num_lines(name), most) for name, most in (ROOMS | OTHERS).items()]
    kernel = sum(count for name, count, _ in rows if name in ROOMS and name != LAB)
    rows.append(("kernel", kernel, sum(most for name, most in ROOMS.items() if name != LAB)))
    rows += [(name, count, HABITS[name]) for name, count in habits().items()]
    return "\n".join(f"{name:<52}{count:>8,} of {most:>7,}" for name, count, most in rows)


if __name__ == "__main__":
    print(table())
