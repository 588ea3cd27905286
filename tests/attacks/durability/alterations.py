"""Files altered, cut short or removed: each is refused or repaired, in a sentence that names it.

An attempt alters one file of a good folder and then does what reads that folder. It must end with exit code 2 or 3 and
a sentence that names the file; or well, having said which file was damaged, with a result that equals the good one.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import Fault, Outcome, attempt, contents
from kills import _copy, _must_end
from subjects import Workshop, template, verb

from outrider.distill import distill, load_responses
from outrider.distill.features import FeatureStore
from outrider.eval import Report
from outrider.heads import load_drafter
from outrider.pair import Pair
from outrider.scripts.eval_setup import trained_drafter


@dataclass
class Alterations:
    """What the alterations of one kind of folder came to."""

    subject: str
    attempts: int = 0
    refused: int = 0
    repaired: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A folder that is read back.

    Attributes:
        after: the verb that it is the result of.
        until: what holds of the work folder where that verb is killed; None for its end.
        files: which of the files below the work folder are altered.
        read: what reads them.
        result: what a repaired one must give again; None where nothing is to be repaired.
    """

    name: str
    after: str
    attempts: int
    files: Callable[[str], bool]
    read: Callable[[Workshop], object]
    result: Callable[[str], bool] | None = None
    until: Callable[[Path], bool] | None = None

    def contents(self, work: Path) -> dict[str, str]:
        """Return the digests of the result."""
        return contents(work, lambda name: self.result is None or not self.result(name))


def _open_pair(workshop: Workshop) -> None:
    pair = Pair.load(workshop.pair)
    pair.open(workshop.target)
    assert pair.recipe()
    assert pair.calibration()


def _read_data(workshop: Workshop) -> None:
    table = load_responses(distill(workshop.recipe(), workshop.target))
    assert len(table[:]["input_ids"]) == len(table)


def _features(workshop: Workshop) -> None:
    table = load_responses(workshop.out / "data")
    FeatureStore.build(workshop.out / "features", workshop.target, table, (2,), shard_bytes=SHARD_BYTES)


def _drafter(workshop: Workshop) -> None:
    load_drafter(trained_drafter(workshop.recipe()), workshop.target)


SHARD_BYTES = 4000
FLIPS = 0.3  # of the alterations at least are single bits


def _in(folder: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(f"{folder}/")


def _is(file: str) -> Callable[[str], bool]:
    return lambda name: name == file


def _before_the_last(work: Path) -> bool:
    listed = [(work / f"out/checkpoints/checkpoint-{step}/SHA256SUMS").exists() for step in (2, 4, 6)]
    return listed == [True, True, False]


def _half_answered(work: Path) -> bool:
    return (work / "out/data.partial/00002.jsonl").exists() and not (work / "out/data").exists()


def _half_computed(work: Path) -> bool:
    shards = len(list((work / "out/features").glob("*/states-*")))
    return shards > 2 and not any((work / "out/features").glob("*/features.json"))


_CHECKPOINTS, _STORED, _TRAINED, _TRAIN = "out/checkpoints", _in("out/features"), _in("out/drafter"), Workshop.train
_FOURTH, _SIXTH = _in(f"{_CHECKPOINTS}/checkpoint-4"), _in(f"{_CHECKPOINTS}/checkpoint-6")
SUBJECTS = [
    Subject("pair", "pair new", 180, _in("pair"), _open_pair),
    Subject("responses", "distill", 80, _in("out/data"), _read_data),
    Subject(
        "responses, unfinished", "distill", 60, _in("out/data.partial"), _read_data, _in("out/data"), _half_answered
    ),
    Subject("features", "features", 60, _STORED, _features, _STORED),
    Subject("features, unfinished", "features", 40, _STORED, _features, _STORED, _half_computed),
    Subject("checkpoint of an interrupted run", "train", 110, _FOURTH, _TRAIN, _TRAINED, _before_the_last),
    Subject("last checkpoint of a finished run", "train", 50, _SIXTH, _TRAIN, _TRAINED),
    Subject("every checkpoint at once", "train", 20, _in(_CHECKPOINTS), _TRAIN, _TRAINED, _before_the_last),
    Subject("recipe.yaml of a run", "train", 20, _is("out/recipe.yaml"), _TRAIN, None, _before_the_last),
    Subject("drafter", "train", 50, _TRAINED, _drafter),
    Subject("provenance.json of a run", "train", 25, _is("out/provenance.json"), _drafter),
    Subject("report.json", "eval", 40, _is("report/report.json"), lambda w: Report.load(w.work / "report")),
]


def run_alterations(root: Path, seed: int, share: float = 1.0, only: list[str] | None = None) -> list[Alterations]:
    """Attack every kind of folder with its number of alterations, times `share`."""
    workshop = Workshop(root)
    _ = workshop.target, workshop.changed, workshop.prompts
    chosen = [s for s in SUBJECTS if not only or s.name in only]
    return [_attack(workshop, s, random.Random(f"{seed} {s.name}"), max(2, round(s.attempts * share))) for s in chosen]


def _attack(workshop: Workshop, subject: Subject, chance: random.Random, count: int) -> Alterations:
    found, kinds = Alterations(subject.name), Counter[str]()
    good = _good(workshop, subject)
    _copy(good, workshop.work)
    files = sorted(name for name in contents(workshop.work) if subject.files(name) and not timed_only(name))
    assert files, f"{subject.name}: nothing to alter in {sorted(contents(workshop.work))}"
    outcome = attempt(lambda: subject.read(workshop))
    assert outcome.code == 0, outcome.said
    expected = subject.contents(workshop.work)
    for number in range(count):
        _copy(good, workshop.work)
        names = files if "every" in subject.name else [files[number % len(files)]]
        kind = "flip" if chance.random() < FLIPS else chance.choice(list(KINDS))
        named = [_altered(workshop.work / name, kind, chance) for name in names]
        kinds[kind] += 1
        found.attempts += 1
        outcome = attempt(lambda: subject.read(workshop))
        whole = subject.contents(workshop.work) == expected
        _judge(found, outcome, f"{kind} {names[0]}", named, whole)
        found.kinds = dict(sorted(kinds.items()))
        print(json.dumps(asdict(found)), flush=True)
    return found


def timed_only(name: str) -> bool:
    """Tell whether nothing ever reads this file: it is there for people."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith(".") or last.endswith(("README.md", ".html"))


def _good(workshop: Workshop, subject: Subject) -> Path:
    """Return the folder as it is before an alteration, made once."""
    kept = workshop.root / "templates" / f"of {subject.after}{'' if subject.until is None else ', killed'}"
    if kept.exists():
        return kept
    is_store = subject.after == "features"
    maker = verb("distill" if is_store else subject.after)
    act: Callable[[], object] = (lambda: _features(workshop)) if is_store else (lambda: maker.act(workshop))
    start = template(workshop, verb("train") if is_store else maker, _must_end)
    _copy(start, workshop.work)
    operations = attempt(act, Fault(0)).operations
    for place in range(operations, 0, -3) if subject.until is not None else ():
        _copy(start, workshop.work)
        was_killed = attempt(act, Fault(place)).code == -signal.SIGKILL
        if was_killed and subject.until is not None and subject.until(workshop.work):
            break
    kept.parent.mkdir(exist_ok=True)
    shutil.copytree(workshop.work, kept, symlinks=True)
    return kept


def _flip(data: bytes, chance: random.Random) -> bytes:
    place, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def _swap(data: bytes, chance: random.Random) -> bytes:
    """Exchange two stretches of the file: what a disk does that writes a block to another's place."""
    half = len(data) // 2 + 1  # never at the end of a line: lines say the same in any order
    return data[half:] + data[:half] if data[half:] + data[:half] != data else _flip(data, chance)


KINDS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "flip": _flip,
    "truncate": lambda data, chance: data[: chance.randrange(len(data))],
    "empty": lambda data, chance: b"",
    "lengthen": lambda data, chance: data + bytes([chance.randrange(256)]),
    "zeros": lambda data, chance: bytes(len(data)),
    "exchange": _swap,
    "remove": lambda data, chance: None,
}


def _altered(file: Path, kind: str, chance: random.Random) -> str:
    """Alter `file`, and return the name that a sentence about it must hold."""
    data = file.read_bytes()
    changed = KINDS[kind](data, chance) if data else None
    if changed is None:
        file.unlink()
    else:
        assert changed != data
        file.write_bytes(changed)
    return file.name


def _judge(found: Alterations, outcome: Outcome, what: str, named: list[str], whole: bool) -> None:
    """Count what became of an altered file; `whole` says whether the result is the good one."""
    names_it = any(name in outcome.said for name in named) or "is not a whole checkpoint" in outcome.said
    if "Traceback" in outcome.said or outcome.code not in (0, 2, 3):
        found.failures.append(f"{what}: ended with {outcome.code}: {outcome.said[-500:]}")
    elif not names_it:
        found.failures.append(f"{what}: silent (exit code {outcome.code}): {outcome.said[-300:]}")
    elif outcome.is_refusal:
        found.refused += 1
    elif not whole:
        found.failures.append(f"{what}: said, but the result differs")
    else:
        found.repaired += 1
