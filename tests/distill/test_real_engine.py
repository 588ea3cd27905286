"""A drafter learns the same from a real vLLM's hidden states as from a plain forward's, whoever is killed meanwhile.

`OUTRIDER_VLLM_PYTHON=/path/to/its/environment ./scripts/test -m served tests/distill/test_real_engine.py`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from outrider.distill import distill
from outrider.distill.engine_checks import UntrustedStatesError
from outrider.distill.features import TargetPasses
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target, embedded_path
from outrider.train import train

from ..conftest import place_of
from ..train.conftest import losses

pytestmark = pytest.mark.served

STEPS = 100
CHANGES = ["data.limit=24", "data.max_new_tokens=48", "target.dtype=float32", "data.features=cached"]
CHANGES += [f"training.max_steps={STEPS}", "training.logging_steps=1", "training.save_steps=1000"]
CHANGES += ["training.eval_strategy=no", "data.holdout=0", "training.bf16=false"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the embedded target by our own decoder."""
    folder = tmp_path_factory.mktemp("answers")
    return distill(load_recipe("embedded-eagle3", [*CHANGES, f"output={folder}/run"]))


def made(output: Path, data: Path, **engine: Any) -> Recipe:
    recipe = load_recipe("embedded-eagle3", [*CHANGES, f"output={output}", f"data.responses={data}"])
    if not engine:
        return recipe
    values = recipe.model_dump()
    values["target"]["engine"] = {"python": str(place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM"))} | engine
    return Recipe.from_dict(values)


def shards(output: Path) -> dict[str, bytes]:
    (folder,) = (output / "features").iterdir()
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def from_engine(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Recipe:
    """A training from an engine's states."""
    recipe = made(tmp_path_factory.mktemp("engine") / "run", data, check="forward")
    train(recipe)
    return recipe


def test_losses_from_an_engine_are_those_from_a_plain_forward(
    tmp_path: Path, data: Path, from_engine: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States within 1e-5 of their norm, the first losses within 1e-5, and all as near as rounding lets them be.

    Adam amplifies what sums in another order leave: a plain training whose states get noise of the engine's size (6e-7)
    parts from itself alike, which is the measure of the later losses.
    """
    plain = made(tmp_path / "run", data)
    train(plain, Target.load("embedded", dtype="float32", device="cpu"))
    noisy, passes = made(tmp_path / "noisy", data), TargetPasses.of
    generator = torch.Generator().manual_seed(1)

    def rounded(states: Tensor | None) -> Any:
        return None if states is None else states * (1 + 6e-7 * torch.randn(states.shape, generator=generator))

    def with_noise(self: TargetPasses, rows: Any) -> Any:
        return ((i, rounded(hidden), rounded(last)) for i, hidden, last in passes(self, rows))

    monkeypatch.setattr(TargetPasses, "of", with_noise)
    train(noisy, Target.load("embedded", dtype="float32", device="cpu"))
    theirs, ours, control = (torch.tensor(losses(recipe)) for recipe in (from_engine, plain, noisy))
    assert len(ours) == STEPS
    assert theirs[:2].tolist() == pytest.approx(ours[:2].tolist(), abs=1e-5)
    apart, alone = (float(((one - ours) / ours).abs().max()) for one in (theirs, control))
    print(f"over {STEPS} steps: {apart:.1e} from an engine, {alone:.1e} from noise")
    assert 0 < apart <= 5 * alone
    for name in ("last", "hidden"):
        one, other = (
            load_file(next((o / "features").glob("*/states-00000.safetensors")))[name]
            for o in (from_engine.output_folder, plain.output_folder)
        )
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_an_engine_with_other_weights_is_refused(tmp_path: Path, data: Path) -> None:
    """It is given another checkpoint by an argument, of which its own command line takes the last."""
    import shutil

    other = tmp_path / "other"
    shutil.copytree(embedded_path(), other)
    tensors = load_file(other / "model.safetensors")
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    from safetensors.torch import save_file

    save_file(tensors | {name: tensors[name] * 1.01}, other / "model.safetensors", {"format": "pt"})
    (other / "SHA256SUMS").unlink(missing_ok=True)
    with pytest.raises(UntrustedStatesError) as refused:
        train(made(tmp_path / "run", data, arguments=["--model", str(other)]))
    assert refused.value.fault == "another checkpoint"


TRAINS = """
import sys
from outrider.recipes import load_recipe
from outrider.train import train
train(load_recipe(sys.argv[1]))
"""


def engines(parent: int) -> Iterator[psutil.Process]:
    for process in psutil.Process(parent).children(recursive=True):
        if "vllm" in " ".join(process.cmdline()).lower():
            yield process


@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_a_store_whose_writer_was_killed_is_the_same_bit_for_bit(
    tmp_path: Path, data: Path, from_engine: Recipe, victim: str
) -> None:
    """The process that fills it, or the engine that it started, at several points."""
    output = tmp_path / "run"
    recipe = made(output, data)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    for after in (0, 1, 2):
        child = subprocess.Popen([sys.executable, "-c", TRAINS, str(file)])
        limit = time.monotonic() + 300
        while len(list(output.glob("features/*/states-*.safetensors"))) <= after:
            assert child.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.005)
        if victim == "trainer":
            child.kill()
            child.wait()
        else:
            for process in engines(child.pid):
                process.send_signal(signal.SIGKILL)
            break
    train(recipe) if victim == "trainer" else child.wait(600)
    assert shards(output) == shards(from_engine.output_folder)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(output) in " ".join(p.info["cmdline"] or []) and p.pid != os.getpid()
    ]
