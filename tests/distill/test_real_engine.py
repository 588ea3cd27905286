"""A drafter learns the same from a real vLLM's hidden states as from a plain forward's, whoever is killed meanwhile.

`OUTRIDER_VLLM_PYTHON=/path/to/its/environment ./scripts/test -m served tests/distill/test_real_engine.py`
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.common.http_client import ask
from outrider.common.server_process import CPU_ENVIRONMENT, python_of, running_server
from outrider.distill import distill, engine_connector
from outrider.distill.engine_checks import UntrustedStatesError
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target, embedded_path
from outrider.train import train
from outrider.train.resource_estimate import plan

from ..conftest import place_of
from ..train.conftest import losses, write_data
from ..train.test_launches import Launch

pytestmark = pytest.mark.served

STEPS = 100
CHANGES = ["data.limit=24", "data.max_new_tokens=48", "target.dtype=float32", "data.features=cached"]
CHANGES += [f"training.max_steps={STEPS}", "training.logging_steps=1", "training.save_steps=1000"]
CHANGES += ["training.eval_strategy=no", "data.holdout=0", "training.bf16=false"]
CHANGES += ["training.packing=false", "training.max_length=null", "training.per_device_train_batch_size=4"]
# Muon makes steps of full size of what is rounding (`benchmarks/results/engine-losses-cpu-fp32.json`).
CHANGES += ["training.optim=sgd", "training.learning_rate=0.05"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the embedded target by our own decoder."""
    folder = tmp_path_factory.mktemp("answers")
    return distill(load_recipe("embedded-eagle3", [*CHANGES, f"output={folder}/run"]))


def made(output: Path, data: Path, *changes: str, **engine: Any) -> Recipe:
    recipe = load_recipe("embedded-eagle3", [*CHANGES, f"output={output}", f"data.responses={data}", *changes])
    if not engine:
        return recipe
    values = recipe.model_dump()
    values["target"]["engine"] = {"python": str(place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM"))} | engine
    return Recipe.from_dict(values)


def shards(output: Path) -> dict[str, bytes]:
    (folder,) = (entry for entry in (output / "features").iterdir() if entry.is_dir())
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def from_engine(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Recipe:
    """A training from an engine's states."""
    recipe = made(tmp_path_factory.mktemp("engine") / "run", data, check="forward")
    train(recipe)
    return recipe


def test_losses_from_an_engine_are_those_from_a_plain_forward(tmp_path: Path, data: Path, from_engine: Recipe) -> None:
    """All of them within 1e-5, and the states within 1e-5 of their norm."""
    plain = made(tmp_path / "run", data)
    train(plain, Target.load("embedded", dtype="float32", device="cpu"))
    theirs, ours = losses(from_engine), losses(plain)
    assert len(ours) == STEPS
    assert ours[-1] < 0.9 * ours[0], "it learns"
    assert theirs == pytest.approx(ours, rel=1e-5)
    for name in ("last", "hidden"):
        one, other = (
            load_file(next((o / "features").glob("*/states-00000.safetensors")))[name]
            for o in (from_engine.output_folder, plain.output_folder)
        )
        assert 0 < float((one - other).norm() / other.norm()) < 1e-5


@contextmanager
def serving(recipe: Recipe, folder: Path) -> Iterator[str]:
    """A vLLM with the connector that is started by hand, with what `outrider plan` says."""
    note = next(note for note in plan(recipe).notes if "a vLLM that writes" in note)
    words = shlex.split(note.partition(" is started with ")[2])
    folder.mkdir()
    shutil.copy(engine_connector.__file__, folder / "engine_connector.py")
    python = python_of(place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM"))
    server = [str(python), "-m", "vllm.entrypoints.openai.api_server", *words, "--port"]
    environment = CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | dict(os.environ) | {"PYTHONPATH": str(folder)}
    with running_server(lambda port: [*server, str(port)], environment, folder / "log", answers_at) as url:
        yield url


def answers_at(url: str) -> str:
    ask(f"{url}/v1/models")
    return url


def test_two_engines_and_two_trainers_make_the_same_store_and_losses(
    tmp_path: Path, data: Path, from_engine: Recipe
) -> None:
    """The engines run already, at two addresses; `accelerate launch` starts the trainers, of which one asks them."""
    changes = [f"target.path={embedded_path()}", "training.per_device_train_batch_size=2"]
    asked = {"python": None, "folder": str(tmp_path / "spool"), "check": "forward"}
    recipe = made(tmp_path / "run", data, *changes, url="http://127.0.0.1:1", **asked)
    with serving(recipe, tmp_path / "one") as one, serving(recipe, tmp_path / "two") as two:
        recipe = made(tmp_path / "run", data, *changes, url=[one, two], **asked)
        (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = Launch("ddp", 2)
        command = launch.command(tmp_path / "recipe.yaml", port)
        done = subprocess.run(command, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    for server in ("one", "two"):
        assert "POST /v1/completions" in (tmp_path / server / "log").read_text()
    assert shards(recipe.output_folder) == shards(from_engine.output_folder)
    assert losses(recipe) == pytest.approx(losses(from_engine), rel=1e-5)


def test_an_engine_with_other_weights_is_refused(tmp_path: Path, data: Path) -> None:
    """It is given another checkpoint by an argument, of which its own command line takes the last."""
    other = tmp_path / "other"
    shutil.copytree(embedded_path(), other)
    tensors = load_file(other / "model.safetensors")
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    save_file(tensors | {name: tensors[name] * 1.01}, other / "model.safetensors", {"format": "pt"})
    (other / "SHA256SUMS").unlink(missing_ok=True)
    with pytest.raises(UntrustedStatesError) as refused:
        train(made(tmp_path / "run", data, arguments=["--model", str(other)]))
    assert refused.value.fault == "another checkpoint"


def engines(parent: int) -> list[psutil.Process]:
    """The API server of a training's engine, and the processes under it, which compute and write."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if "vllm" in " ".join(process.cmdline()).lower() else []
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough random rows for twenty shards."""
    generator, target = torch.Generator().manual_seed(0), Target.load("embedded", dtype="float32", device="cpu")
    lengths = torch.randint(60, 200, (160,), generator=generator).tolist()
    made = [torch.randint(5, 4000, (n,), generator=generator).tolist() for n in lengths]
    values = [(tokens, [0] + [1] * (len(tokens) - 1)) for tokens in made]
    given = [{"id": str(i), "suite": "s", "input_ids": t, "loss_mask": m} for i, (t, m) in enumerate(values)]
    return write_data(tmp_path_factory.mktemp("rows") / "data", given, target)


@dataclass
class Killed:
    """A training whose store must come about, whoever is killed.

    Attributes:
        found: of each shard that was noted as whole at a kill, its place on the disk: it is never made again.
    """

    recipe: Recipe
    file: Path
    child: subprocess.Popen[bytes] | None = None
    killed: set[int] = field(default_factory=set)
    found: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def shards(self) -> list[Path]:
        return list(self.recipe.output_folder.glob("features/*/states-*.safetensors"))

    def running(self) -> subprocess.Popen[bytes]:
        if self.child is None:
            self.file.write_text(self.recipe.to_yaml())
            command = [sys.executable, "-m", "outrider.train", str(self.file), "training.use_cpu=true"]
            with self.file.with_suffix(".log").open("ab") as log:
                self.child = subprocess.Popen(command, stdout=log, stderr=log)
        return self.child

    def waits(self, until: Callable[[], Any], seconds: float = 400) -> Any:
        limit, child = time.monotonic() + seconds, self.running()
        while not (seen := until()):
            assert child.poll() is None, f"it ended by itself: {self.file.with_suffix('.log').read_text()[-3000:]}"
            assert time.monotonic() < limit
            time.sleep(0.0005)
        return seen

    def kill(self, victim: str, chance: random.Random) -> None:
        """Kill the trainer, the engine, its server alone, one that starts, or the process that writes, in mid-write."""
        before, child = len(self.shards), self.running()
        if victim != "starting":
            self.waits(lambda: len(self.shards) > before)
            time.sleep(chance.uniform(0, 0.2))
        chosen = self.waits(lambda: [process for process in engines(child.pid) if process.pid not in self.killed])
        if victim == "writer":
            self.waits(lambda: list((self.recipe.output_folder / "engine").glob(".*.part")))
        parts = {"trainer": [psutil.Process(child.pid)], "server": chosen[:1], "writer": chosen[1:]}
        for process in parts.get(victim, chosen):
            with suppress(psutil.NoSuchProcess):
                process.kill()
            self.killed.add(process.pid)
        noted = "".join(sums.read_text() for sums in self.recipe.output_folder.glob("features/*/SHA256SUMS"))
        whole = [file for file in self.shards if file.name in noted]  # a kill may come before its line is there
        self.found |= {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in whole}
        if victim == "trainer":
            child.wait()
            self.child = None


def killed_at_random(recipe: Recipe, folder: Path, victims: Sequence[str], seed: int) -> dict[str, bytes]:
    """Kill these one after the other; return the files of the store that comes about, none of them made twice."""
    made, chance = Killed(recipe, folder / "recipe.yaml"), random.Random(seed)
    for victim in victims:
        made.kill(victim, chance)
    assert made.running().wait(400) == 0, made.file.with_suffix(".log").read_text()[-3000:]
    assert made.found.items() <= {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in made.shards}.items()
    output = str(recipe.output_folder)
    left = [p for p in psutil.process_iter(["cmdline"]) if output in " ".join(p.info["cmdline"] or [])]
    assert not left
    assert not list((recipe.output_folder / "engine").glob("*.safetensors"))
    return shards(recipe.output_folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> dict[str, bytes]:
    """The store of a training that nobody disturbs."""
    recipe = made(tmp_path_factory.mktemp("whole") / "run", rows, "training.max_steps=1", check="logits")
    train(recipe)
    return shards(recipe.output_folder)


@pytest.mark.parametrize("seed", range(4))
def test_a_store_whose_makers_were_killed_is_the_same_bit_for_bit(
    tmp_path: Path, rows: Path, whole: dict[str, bytes], seed: int
) -> None:
    """The engine as it works and as it starts, its writer in mid-write, its server alone, and who fills the store."""
    recipe = made(tmp_path / "killed", rows, "training.max_steps=1", check="logits")
    victims = ["engine", "starting", "writer", "trainer", "server"]
    random.Random(seed).shuffle(victims)
    assert killed_at_random(recipe, tmp_path, victims, seed) == whole
