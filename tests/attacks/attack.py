"""Attacks on what Outrider reads from strangers, counted.

# every attempt to run code through a file, with "y" on stdin
python tests/attacks/attack.py execution

# 1000 damaged and hostile files, and what became of each command
python tests/attacks/attack.py fuzz --count 1000 --seed 0 --out figures.json

# text that a terminal or a page would obey, in every place
python tests/attacks/attack.py escapes --seed 0
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import escapes
import runner
from execution import MARK
from execution import attempts as all_attempts
from fuzzing import damaged
from world import Attempt, copied, make_world


def attack(attempts: list[Attempt], world: Path, folder: Path, whole: str) -> dict[str, Any]:
    """Make every attempt; return counts, and what ran or ended as no command may."""
    ran, odd, codes = [], [], Counter[int]()
    most = {"cpu": 0.0, "seconds": 0.0, "gigabytes": 0.0}
    for attempt in attempts:
        copied(world, folder)
        attempt.plant(folder)
        for command in attempt.commands:
            outcome, what = _run(attempt.name, command, folder, whole), {"attempt": attempt.name, "command": command}
            codes[outcome.code] += 1
            most = {name: max(value, getattr(outcome, name)) for name, value in most.items()}
            if not outcome.held or (seen := escapes.obeyed(folder)):
                odd.append(what | asdict(outcome) | ({} if not outcome.held else {"obeyed": seen}))
            if (folder / MARK).exists():
                ran.append(what)
                (folder / MARK).unlink()
    counts = {"codes": dict(codes), "files": dict(Counter(a.file for a in attempts)), "most": most}
    return {"attempts": len(attempts), "commands": sum(codes.values()), "ran": ran, **counts, "odd": odd}


def _require_obeyed(folder: Path) -> None:
    """Show that text which is obeyed is noticed."""
    folder.mkdir()
    (folder / ".said").write_text(f"\x1b[31m {escapes.SECRET}")
    (folder / "gate.md").write_text("a [link](http://evil)")
    (folder / "gate.xml").write_text("<testsuites><evil/></testsuites>")
    if len(seen := escapes.obeyed(folder)) != 4:
        raise RuntimeError(f"of four things that are obeyed these were seen: {seen}")


def _require_alarm(world: Path, folder: Path) -> None:
    """Show that code which runs is noticed: with the user's word, a target's own code does."""
    copied(world, folder)
    next(a for a in all_attempts() if a.name == "code as both in target").plant(folder)
    outcome = runner.run(["distill", "eagle.yaml", "output=new", "target.trust_remote_code=true"], folder)
    if not (folder / MARK).exists():
        raise RuntimeError(f"code that was trusted left no mark: {outcome.said}")


def _run(name: str, command: list[str], folder: Path, whole: str) -> runner.Outcome:
    """Run a command and say on stderr how it ended: it takes a while until all are counted.

    Args:
        whole: print all output of "all" commands, of "ODD" ones, or of none ("").
    """
    outcome = runner.run(command, folder)
    odd = "" if outcome.held else " ODD"
    last = (outcome.said.strip().splitlines() or [""])[-1][:150]
    took = f"{outcome.cpu} s of {outcome.seconds} s, {outcome.gigabytes} GB"
    line = f"{outcome.code} {took}{odd} · {name} · {' '.join(command[:3])} · {last}"
    print(line, file=sys.stderr, flush=True)
    if whole == "all" or (whole and odd):
        print(outcome.said, file=sys.stderr)
    return outcome


def main() -> int:
    """Run one program; the exit code is 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("execution", "fuzz", "escapes"))
    parser.add_argument("--count", type=int, default=1000, help="files to damage")
    parser.add_argument("--seed", type=int, default=0)
    numbers = "only these damaged files, with all they say"
    parser.add_argument("--numbers", type=int, nargs="*", default=[], help=numbers)
    parser.add_argument("--only", default="", help="attempts whose name holds this")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    given = parser.parse_args()
    runner.prepare()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        world, folder = Path(scratch) / "world", Path(scratch) / "attacked"
        folder.mkdir()
        make_world(folder)  # pairs say where their target is: every copy lies where the first world was
        folder.rename(world)
        if given.program == "execution":
            _require_alarm(world, folder)
            chosen, whole = [a for a in all_attempts() if given.only in a.name], "ODD" if given.only else ""
        elif given.program == "escapes":
            _require_obeyed(folder)
            chosen, whole = [a for a in escapes.attempts(given.seed) if given.only in a.name], "ODD"
        else:
            drawn = enumerate(damaged(given.count, given.seed))
            chosen = [a for number, a in drawn if not given.numbers or number in given.numbers]
            whole = "all" if given.numbers else ""
        found = {"seed": given.seed} | attack(chosen, world, folder, whole)
    found["minutes"] = round((time.monotonic() - began) / 60, 1)
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    return int(bool(found["odd"] or found["ran"]))


if __name__ == "__main__":
    sys.exit(main())
