"""Full disks and quotas, errors of every sort of operation, interruptions, half reads and writes, and an odd clock.

An attempt ends well, with the same result, or with exit code 2 and one sentence. Then the same verb runs again, without
a fault: it must end well, leave what an uninterrupted run leaves, and nothing beside it.
"""

from __future__ import annotations

import errno
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import SORTS, Fault, Outcome, attempt, contents, names
from kills import Left, _copy, _must_end, differences
from subjects import VERBS, Verb, Workshop, attack_each, template

from outrider.pair import verify

SHORT, SECONDS, GIGABYTES = -1, 10.0, 1.0
# By name: the sort of operations, the fault's kind, and whether it lasts. A call that is always interrupted never ends,
# in any program.
KINDS = {
    "EIO": ("changes", errno.EIO, False),
    "EIO for ever": ("changes", errno.EIO, True),
    "ENOSPC": ("space", errno.ENOSPC, False),
    "ENOSPC for ever": ("space", errno.ENOSPC, True),
    "EDQUOT": ("space", errno.EDQUOT, False),
    "EDQUOT for ever": ("space", errno.EDQUOT, True),
    "EINTR": ("waits", errno.EINTR, False),
    "short writes": ("writes", SHORT, True),
    "EAGAIN when writing": ("writes", errno.EAGAIN, False),
    "EIO when reading": ("reads", errno.EIO, False),
    "EIO when reading, for ever": ("reads", errno.EIO, True),
    "short reads": ("reads", SHORT, True),
    "EMFILE": ("opens", errno.EMFILE, False),
    "ESTALE": ("looks", errno.ESTALE, False),
    "ENOMEM when mapping": ("maps", errno.ENOMEM, False),
    "EIO when closing": ("closes", errno.EIO, False),
    "EINTR when closing": ("closes", errno.EINTR, False),
    "ENOLCK": ("locks", errno.ENOLCK, False),
    "clock set back": ("clock", 1, False),
}
_HARMLESS = ("EINTR", "short writes", "short reads", "clock set back")


@dataclass
class Faults:
    """What the faults of one verb came to.

    Attributes:
        operations: on files, of an uninterrupted run.
        struck: faults by kind. held: runs that ended well all the same, and refused: those that said why not.
        failures: of what must hold, one line each.
    """

    verb: str
    operations: int = 0
    struck: dict[str, int] = field(default_factory=dict)
    held: int = 0
    refused: int = 0
    seconds: float = 0.0
    gigabytes: float = 0.0
    failures: list[str] = field(default_factory=list)


def run_faults(root: Path, seed: int, share: float = 1.0, only: list[str] | None = None) -> list[Faults]:
    """Attack every verb with its number of faults, times `share`."""
    return attack_each(
        Workshop(root), {v: round(v.faults * share) or 1 for v in VERBS if v.faults}, seed, only, _attack
    )


def _attack(workshop: Workshop, verb: Verb, chance: random.Random, count: int) -> Faults:
    start, rows = template(workshop, verb, _must_end), Faults(verb.name)
    _copy(start, workshop.work)
    whole = attempt(lambda: verb.act(workshop), Fault(0))
    assert whole.code == 0, whole.said
    rows.operations, struck = whole.operations, Counter[str]()
    expected = names(workshop.work), contents(workshop.work, verb.varies)
    limit = max(SECONDS, 5 * whole.seconds)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        sort, *what = KINDS[kind]
        place = chance.randrange(whole.counts[SORTS.index(sort)] or 1) + 1
        _copy(start, workshop.work)
        outcome = attempt(lambda: verb.act(workshop), Fault(place, *what, sort))
        if not outcome.struck:
            continue
        struck[kind] += 1
        rows.struck = dict(struck)
        rows.failures += [
            f"{kind} at {place}: {line}" for line in _judge(workshop, verb, kind, outcome, expected, rows)
        ]
        rows.seconds, rows.gigabytes = max(rows.seconds, outcome.seconds), max(rows.gigabytes, outcome.gigabytes)
        if outcome.seconds > limit or outcome.gigabytes > GIGABYTES:
            rows.failures.append(f"{kind} at {place}: {outcome.seconds} s, {outcome.gigabytes} GB")
        print(json.dumps(asdict(rows)), flush=True)
    return rows


def _judge(workshop: Workshop, verb: Verb, kind: str, first: Outcome, expected: Left, rows: Faults) -> list[str]:
    """Return what did not hold of an attempt with a fault, and of the run after it."""
    lines, is_refused = [], first.is_refusal and "Traceback" not in first.said
    if verb.intact:
        lines += [f"the pair is not whole: {line}" for line in verify(workshop.pair)]
    if first.code and (not is_refused or kind in _HARMLESS):
        lines.append(f"ended with {first.code}: {first.said[-700:]}")
    elif first.code == 0 and "for ever" not in kind:
        lines += [
            f"said nothing, and {line}" for line in differences(workshop, verb, first, expected) if not _is_lock(line)
        ]
    rows.held, rows.refused = rows.held + (first.code == 0), rows.refused + is_refused
    second = attempt(lambda: verb.act(workshop))
    return lines + differences(workshop, verb, second, expected)


def _is_lock(line: str) -> bool:
    """Tell whether a line is of a lock's file that could not be removed: nobody holds it, and the next run takes it."""
    return line.startswith("left behind: ") and line.endswith(".lock")
