"""Attempts to run code through every file that a verb reads, with "y" on stdin, counted.

python tests/attacks/attack.py --out figures.json
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

import runner
from execution import MARK
from execution import attempts as all_attempts
from world import Attempt, copied, make_world


def attack(attempts: list[Attempt], world: Path, folder: Path) -> dict[str, Any]:
    """Make every attempt; return counts, and what ran or ended as no command may."""
    ran = []
    odd = []
    codes = Counter[int]()
    most = {"cpu": 0.0, "seconds": 0.0, "gigabytes": 0.0}
    for attempt in attempts:
        copied(world, folder)
        attempt.plant(folder)
        for command in attempt.commands:
            outcome, what = runner.run(command, folder), {"attempt": attempt.name, "command": command}
            print(outcome.code, attempt.name, *command[:3], file=sys.stderr, flush=True)  # it takes a while
            codes[outcome.code] += 1
            most = {name: max(value, getattr(outcome, name)) for name, value in most.items()}
            if not outcome.held:
                odd.append(what | asdict(outcome))
            if (folder / MARK).exists():
                ran.append(what)
                (folder / MARK).unlink()
    counts = {"codes": dict(codes), "most": most}
    return {"attempts": len(attempts), "commands": sum(codes.values()), "ran": ran, **counts, "odd": odd}


def _require_alarm(world: Path, folder: Path) -> None:
    """Show that code which runs is noticed: with the user's word, a target's own code does."""
    copied(world, folder)
    next(a for a in all_attempts() if a.name == "code as both in target").plant(folder)
    outcome = runner.run(["distill", "eagle.yaml", "output=new", "target.trust_remote_code=true"], folder)
    if not (folder / MARK).exists():
        raise RuntimeError(f"code that was trusted left no mark: {outcome.said}")


def main() -> int:
    """Make all attempts; the exit code is 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        _require_alarm(world, folder)
        found = attack([a for a in all_attempts() if given.only in a.name], world, folder)
    found["minutes"] = round((time.monotonic() - began) / 60, 1)
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    return int(bool(found["odd"] or found["ran"]))


if __name__ == "__main__":
    sys.exit(main())
