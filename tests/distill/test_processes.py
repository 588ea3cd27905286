"""Several processes answer together: the data set is that of one, and none waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState, debug_launcher
from torch import distributed

from outrider.common.places import MARKER
from outrider.decode import Decoder, Output
from outrider.distill import distill, load_responses, prompt_table
from outrider.distill.decoding import batches
from outrider.recipes import Recipe
from outrider.targets import Target

from .conftest import Place, killed

TEXTS = [f"{text} {i}" for i in range(6) for text in ("def add(first, second):", "for name in", "class Stack:", "x")]


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target) -> Place:
    data = {"max_new_tokens": 8, "batch_size": 2, "sampling": {"temperature": 1.0}}
    return Place(tmp_path, tiny_target, [{"text": text} for text in TEXTS], data)


def note_who_answers(monkeypatch: pytest.MonkeyPatch, notes: Path, slow_rank: str = "") -> None:
    """Write down who answers each batch; the process `slow_rank` takes two seconds for each."""
    notes.mkdir()
    generate = Decoder.generate

    def noted(self: Decoder, prompts: Any, *args: Any, sequence_ids: Any, **kwargs: Any) -> Output:
        rank = str(distributed.get_rank())
        if rank == slow_rank:
            time.sleep(2)
        elif slow_rank:
            time.sleep(0.2)  # so that one process does not do all before the next has begun
        name = "-".join(map(str, sequence_ids))
        assert not (notes / name).exists(), "a batch is answered once"
        (notes / name).write_text(rank)
        return generate(self, prompts, *args, sequence_ids=sequence_ids, **kwargs)

    monkeypatch.setattr(Decoder, "generate", noted)


def distil_together(recipe: Recipe, target: Target) -> None:
    PartialState(cpu=True)
    distill(recipe, target)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*") if file.name != "SHA256SUMS"}


def test_any_number_of_processes_gives_the_same_data_set_and_a_slow_one_holds_nobody_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = place.distil("one")
    note_who_answers(monkeypatch, tmp_path / "notes", slow_rank="1")
    several = place.recipe("several")
    debug_launcher(distil_together, (several, place.target), num_processes=3)
    assert content(several.output_folder / "data") == content(one)
    answered = Counter(file.read_text() for file in (tmp_path / "notes").iterdir())
    assert set(answered) == {"0", "1", "2"}
    assert answered["1"] <= 3 < answered["0"] + answered["2"]
    assert sorted(p.name for p in several.output_folder.iterdir()) == [MARKER, "data"], "nothing is left beside it"


def test_a_run_killed_while_reading_prompts_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = place.recipe("cut")

    with monkeypatch.context() as patch:
        patch.setattr(prompt_table, "_plain", lambda prompt: os.kill(os.getpid(), signal.SIGKILL))
        killed(lambda: distill(recipe, place.target))
    assert list(recipe.output_folder.iterdir()) == []
    distill(recipe, place.target)
    assert sorted(p.name for p in recipe.output_folder.iterdir()) == [MARKER, "data"]


def test_batches_become_smaller_towards_the_end_for_several_processes_only() -> None:
    assert [len(b) for b in batches(range(10), 4, 1)] == [4, 4, 2]
    sizes = [len(b) for b in batches(range(100), 16, 2)]
    assert sum(sizes) == 100
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-3:-1] == [4, 4]


@pytest.fixture
def checkpoint(place: Place, tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    place.target.model.save_pretrained(folder)
    place.target.require_tokenizer().save_pretrained(folder)
    return folder


def launch(recipe: Recipe, tmp_path: Path, rank: int, size: int, port: int) -> subprocess.Popen[str]:
    """Start one process of a launch without a launcher that would end the others, as srun does."""
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.distill", str(tmp_path / "recipe.yaml")],
        env=os.environ | environment | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_others_and_the_next_run_takes_its_batches(
    place: Place, checkpoint: Path, tmp_path: Path, killed: int
) -> None:
    """Whichever of them it is, and however many there are afterwards."""
    slow = place.recipe("cut", path=checkpoint, max_new_tokens=300, batch_size=1)
    running = [launch(slow, tmp_path, rank, 2, 29611 + killed) for rank in range(2)]
    partial = slow.output_folder / "data.partial"
    while not list(partial.glob("*.jsonl")):
        assert all(process.poll() is None for process in running), [p.communicate()[1] for p in running]
        time.sleep(0.05)
    running[killed].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, said = running[1 - killed].communicate(timeout=60)
    assert running[1 - killed].returncode == 70
    assert f"process {killed} of 2 died without a word" in said
    assert time.monotonic() - began < 30
    kept = list(partial.glob("*.jsonl"))
    assert 0 < len(kept) < len(TEXTS)
    again = [launch(slow, tmp_path, rank, 3, 29613 + killed) for rank in range(3)]
    assert [process.wait(120) for process in again] == [0, 0, 0]
    whole = distill(place.recipe("whole", path=checkpoint, max_new_tokens=300, batch_size=8))
    assert load_responses(slow.output_folder / "data")[:] == load_responses(whole)[:]


@pytest.mark.slow
def test_an_error_of_the_first_process_ends_the_others_with_it(place: Place, checkpoint: Path, tmp_path: Path) -> None:
    recipe = place.recipe("other", path=checkpoint)
    distill(recipe)
    changed = place.recipe("other", path=checkpoint, max_new_tokens=9)
    running = [launch(changed, tmp_path, rank, 2, 29621) for rank in range(2)]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2]
    assert "max_new_tokens (was 8, is 9)" in said[0]
    assert "[process 1] error: process 0 of 2 ended: " in said[1]
    assert "max_new_tokens (was 8, is 9)" in said[1]
