"""What checking costs: opening a pair and resuming a training, with digests and without, the first time and the second.

The first time, no file was read by this version before; the second is another process that finds the digests in the
cache folder. The drafter is large enough for its files to count.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import attempt
from subjects import Workshop

from outrider.common import digest_cache, digests
from outrider.heads import Medusa, MedusaConfig
from outrider.pair import Pair, new_pair
from outrider.train import checkpoints

ROUNDS = 7


@dataclass
class Cost:
    """Seconds of one operation, without digests, the first time and the second: of the processor, medians.

    Attributes:
        megabytes: of the files that are read.
        fastest: seconds on the clock of the fastest run of each kind; other work on the machine is in all of them.
    """

    operation: str
    megabytes: float
    without: float
    first: float
    second: float
    fastest: dict[str, float] = field(default_factory=dict)


def run_costs(root: Path) -> list[Cost]:
    workshop = Workshop(root)
    workshop.work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    drafter = Medusa.build(MedusaConfig(num_heads=2), workshop.target)
    new_pair(workshop.pair, workshop.target, drafter, workshop.recipe(), calibration=workshop.prompts)
    folder = _large(workshop.pair)
    checkpoint = _checkpoint(workshop.work / "checkpoints" / "checkpoint-1")
    time.sleep(2.5)  # what was written just now is always read again
    return [
        _cost("open a pair", workshop, folder, lambda: Pair.load(folder)),
        _cost("find the checkpoint to resume from", workshop, checkpoint, lambda: _resume(checkpoint)),
    ]


def _large(folder: Path) -> Path:
    """Give a pair a drafter of 256 MB, as that of an 8B target has; its weights are not loaded here."""
    manifest = Pair.load(folder).manifest
    weights = folder / "drafter" / "model.safetensors"
    weights.write_bytes(_noise(256))
    files = manifest.drafter.files | {"model.safetensors": digests.file_digest(weights, again=True)}
    changed = manifest.model_copy(update={"drafter": manifest.drafter.model_copy(update={"files": files})})
    changed.model_copy(update={"digest": changed.identity()}).sealed().write(folder)
    return folder


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, size in (("model.safetensors", 256), ("optimizer.pt", 512), ("scheduler.pt", 0)):
        (folder / name).write_bytes(_noise(size))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    digests.seal(folder)
    return folder


def _noise(megabytes: int) -> bytes:
    return torch.randint(0, 256, (megabytes * 2**20,), dtype=torch.uint8).numpy().tobytes()


def _resume(checkpoint: Path) -> None:
    assert checkpoints.last_complete(checkpoint.parent) == checkpoint


def _cost(name: str, workshop: Workshop, folder: Path, act: Callable[[], object]) -> Cost:
    """Time `act` in turns: without digests, with an empty cache, and with a full one, each in a new process."""
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
    runs: dict[str, list[tuple[float, float]]] = {"without": [], "first": [], "second": []}
    for _ in range(ROUNDS):
        runs["without"].append(_timed(lambda: _without(act)))
        shutil.rmtree(workshop.root / "cache", ignore_errors=True)
        runs["first"].append(_timed(act))
        runs["second"].append(_timed(act))
    medians = {kind: round(statistics.median(used for used, _ in times), 4) for kind, times in runs.items()}
    fastest = {kind: round(min(clock for _, clock in times), 4) for kind, times in runs.items()}
    return Cost(name, round(size, 1), medians["without"], medians["first"], medians["second"], fastest)


def _timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the processor and those on the clock."""

    def measured() -> None:
        digest_cache.forget()
        used, began = time.process_time(), time.perf_counter()
        act()
        print(f"{time.process_time() - used:.6f} {time.perf_counter() - began:.6f}")

    outcome = attempt(measured)
    assert outcome.code == 0, outcome.said
    used, clock = outcome.said.split()[-2:]
    return float(used), float(clock)


def _without(act: Callable[[], object]) -> None:
    with _unchecked():
        act()


@contextmanager
def _unchecked():
    """Take the checks away: what was read before them stays."""
    digests.listed_problems, Pair.require_whole = lambda folder, expected: [], lambda self: None
    yield
