"""SIGKILL before chosen operations on files, and at chosen times: nothing is lost, and a second run ends as the first.

    python tests/attacks/durability/kills.py --out kills.json      # all of it: an hour on two busy cores

Needs Linux and a C compiler. After each kill the same verb runs again. It must end well, leave what an uninterrupted
run leaves (bit for bit, but for what holds times), and nothing beside it. A pair must be whole at any moment, before
anything is cleared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the world that all attacks share

import datasets
import torch
from harness import Outcome, attempt, contents, names, under_interposition
from subjects import VERBS, Verb, Workshop, attack_each, template

from outrider.pair import verify

Left = tuple[set[str], dict[str, str]]  # names of all that a run leaves, and digests of what it leaves alike each time
TIMED_SHARE = 0.25  # of the kills come at a time instead of before an operation


@dataclass
class Kills:
    """What the kills of one verb came to.

    Attributes:
        operations: on files, of an uninterrupted run.
        kills: that hit. missed: whose run had ended before.
        failures: of what must hold, one line each.
    """

    verb: str
    operations: int = 0
    kills: int = 0
    missed: int = 0
    failures: list[str] = field(default_factory=list)


def run_kills(root: Path, seed: int, share: float = 1.0, only: list[str] | None = None) -> list[Kills]:
    """Attack every verb with its number of kills, times `share`."""
    return attack_each(Workshop(root), {v: round(v.kills * share) or 1 for v in VERBS if v.kills}, seed, only, _attack)


def _attack(workshop: Workshop, verb: Verb, chance: random.Random, count: int) -> Kills:
    start, found = template(workshop, verb, _must_end), Kills(verb.name)
    _copy(start, workshop.work)
    began = time.monotonic()
    whole = attempt(lambda: verb.act(workshop), kill_before=0)
    seconds = time.monotonic() - began
    assert whole.code == 0, whole.said
    found.operations = whole.operations
    expected = names(workshop.work), contents(workshop.work, verb.varies)
    num_timed = round(count * TIMED_SHARE)
    places: list[int | float] = [chance.uniform(0, seconds) for _ in range(num_timed)]
    places += _places(chance, whole.operations, count - num_timed)
    for place in places:
        _copy(start, workshop.work)
        _kill(workshop, verb, place, expected, found)
        print(json.dumps(asdict(found)), flush=True)
    return found


def _places(chance: random.Random, operations: int, count: int) -> list[int]:
    """Return operations to be killed before: one from each of `count` equal parts, with the first and the last."""
    edges = [1 + round(i * operations / count) for i in range(count + 1)]
    inner = [chance.randrange(low, max(low + 1, high)) for low, high in pairwise(edges)]
    return sorted({1, operations, *inner[1:-1]})


def _kill(workshop: Workshop, verb: Verb, place: int | float, expected: Left, found: Kills) -> None:
    moment = {"kill_after": place} if isinstance(place, float) else {"kill_before": place}
    first = attempt(lambda: verb.act(workshop), **moment)
    if first.code != -signal.SIGKILL:
        found.missed += 1
        if first.code:
            found.failures.append(f"{place}: {first.said[-600:]}")
        return
    found.kills += 1
    if verb.intact and (lines := verify(workshop.pair)):
        found.failures.append(f"{place}: the pair is not whole: {lines}")
    second = attempt(lambda: verb.act(workshop))
    found.failures += [f"{place}: {line}" for line in differences(workshop, verb, second, expected)]


def differences(workshop: Workshop, verb: Verb, second: Outcome, expected: Left) -> list[str]:
    """Return what the run after a kill left that an uninterrupted one does not, or the other way round."""
    if second.code:
        return [f"the second run ended with {second.code}: {second.said[-800:]}"]
    there, same = names(workshop.work), contents(workshop.work, verb.varies)
    lines = [f"left behind: {name}" for name in sorted(there - expected[0]) if not verb.wanders(name)]
    lines += [f"missing: {name}" for name in sorted(expected[0] - there) if not verb.wanders(name)]
    return lines + [f"differs: {n}" for n in sorted(same.keys() & expected[1].keys()) if same[n] != expected[1][n]]


def _copy(start: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    for beside in work.parent.glob(f".{work.name}*"):
        beside.unlink()
    shutil.copytree(start, work, symlinks=True)


def _must_end(action: object) -> None:
    outcome = attempt(action)  # type: ignore[arg-type]
    assert outcome.code == 0, outcome.said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of kills")
    parser.add_argument("--only", action="append", help="a verb; may be repeated")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    root = Path(os.environ.get("OUTRIDER_ATTACK") or tempfile.mkdtemp(prefix="outrider-attack-"))
    under_interposition(root)
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    try:
        rows = [{"seed": given.seed} | asdict(row) for row in run_kills(root, given.seed, given.share, given.only)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = json.dumps(rows, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
