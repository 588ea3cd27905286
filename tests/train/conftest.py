"""A tiny target on disk and in memory, a tiny distilled data set, and recipes over them."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, TrainingArguments

from outrider.common import digests
from outrider.distill.features import PRECISIONS, Precision
from outrider.heads import DrafterLoss, Eagle3, drafter_config
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import TrainResult, train
from outrider.train import __main__ as entry
from outrider.train import checkpoints as folders

from ..closeness import assert_same, computing_in
from ..forked import Forked

MakeRecipe = Callable[..., Recipe]

EAGLE3 = {"type": "eagle3", "steps": 3, "draft_vocab_size": 96}
DRAFT_MODEL = {"type": "draft_model", "model": {"num_hidden_layers": 1}}

# 61 rows, of which a few are held out: no global batch of 8 divides them, so the last one of an epoch is a short one.
NUM_ROWS = 61


def make_rows(vocab: int, count: int = NUM_ROWS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        prompt, response = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 8), (5, 16)))
        # Few different tokens, so that there is something to learn in a few dozen steps.
        tokens = torch.randint(0, vocab // 4, (prompt + response,), generator=generator).tolist()
        mask = [0] * prompt + [1] * response
        rows.append({"id": f"row-{i}", "suite": "tiny", "input_ids": tokens, "loss_mask": mask})
    return rows


def write_data(folder: Path, rows: list[dict[str, Any]], target: Target, **provenance: Any) -> Path:
    """A finished data folder, as `distill` leaves it; `provenance` is said of it beside what every folder says."""
    from datasets import Dataset
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    Dataset.from_list([{"content": row["id"]} | row for row in rows]).save_to_disk(str(folder))
    saved = {
        "schema_version": 2,
        "target": target.fingerprint().to_dict(),
        "prompts": "0" * 64,
        "sampling": {},
        "source": {},
        "counts": {},
    }
    (folder / "provenance.json").write_text(json.dumps(saved | provenance))
    digests.seal(folder)
    return folder


def arguments(folder: Path, **values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **values)


def built(target: Target, **values: Any) -> Any:
    drafter_class, config = drafter_config(values)
    return drafter_class.build(config, target)


def history(recipe: Recipe, key: str | None = None) -> list[Any]:
    """Return what the trainer logged up to the last whole checkpoint; of one key its values alone."""
    last = folders.last_complete(recipe.output_folder / "checkpoints")
    assert last is not None
    log = json.loads((last / folders.STATE).read_text())["log_history"]
    return log if key is None else [entry[key] for entry in log if key in entry]


def losses(recipe: Recipe) -> list[float]:
    return history(recipe, "loss")


def weights(trained: TrainResult | Path) -> bytes:
    folder = trained if isinstance(trained, Path) else trained.drafter_folder
    return (folder / "model.safetensors").read_bytes()


def provenance(recipe: Recipe) -> dict[str, Any]:
    return json.loads((recipe.output_folder / "provenance.json").read_text())


def halved(whole: TrainResult, *lost: str) -> None:
    """Leave beside a training's output, as that of a run named `half`, all but its last checkpoint (or `lost`)."""
    output = whole.drafter_folder.parent
    shutil.copytree(output, half := output.with_name("half"))
    for name in lost or ("checkpoints/checkpoint-12",):
        shutil.rmtree(half / name)


@contextmanager
def trainings_in_float64() -> Iterator[None]:
    """Let trainings be of float64, states that are stored included."""
    with pytest.MonkeyPatch.context() as patch, computing_in(torch.float64):
        patch.setitem(PRECISIONS, "float64", Precision("float64", torch.float64))
        yield


@contextmanager
def in_float64(target: Target) -> Iterator[Target]:
    """Let trainings be of float64: give the same target in it."""
    doubled = Target(copy.deepcopy(target.model).double(), target.tokenizer)
    doubled.fingerprint = target.fingerprint  # type: ignore[method-assign] # which has the same numbers
    with trainings_in_float64():
        yield doubled


def train_alike(
    one: Recipe, others: Sequence[Recipe], target: Target, start: Callable[[Recipe, Target], Any] = train
) -> None:
    """Train here, and the others as `start` does: all losses are the same.

    In float64: what an optimizer makes of a difference has no bound that could be told.
    """
    with in_float64(target) as doubled:
        train(one, doubled)
        for made in others:
            start(made, doubled)
            assert_same(losses(made), losses(one))


def train_in_two(recipe: Recipe, target: Target | None = None) -> None:
    from accelerate import debug_launcher

    debug_launcher(train, (recipe, target), num_processes=2)


def require_same_drafter(one: Recipe, other: Recipe) -> None:
    """Two trainings of `in_float64` have left the same weights."""
    ours, theirs = (load_file(made.output_folder / "drafter" / "model.safetensors") for made in (one, other))
    assert {weight.dtype for weight in ours.values() if weight.is_floating_point()} == {torch.float64}
    assert_same(ours, theirs)


def in_loss(
    monkeypatch: pytest.MonkeyPatch, call: int, act: Callable[[DrafterLoss], DrafterLoss | None], training: bool = True
) -> None:
    """Let `act` see, and change, the result of EAGLE-3's `call`-th loss, in training or evaluation."""
    original, calls = Eagle3.loss, [0]

    def loss(self: Eagle3, batch: Any) -> DrafterLoss:
        result = original(self, batch)
        calls[0] += self.training == training
        return (act(result) or result) if self.training == training and calls[0] == call else result

    monkeypatch.setattr(Eagle3, "loss", loss)


def asked_in(monkeypatch: pytest.MonkeyPatch, call: int, *signals: int, training: bool = True) -> None:
    """Let the system signal this process while that loss is computed."""

    def ask(result: DrafterLoss) -> None:
        for number in signals:
            signal.raise_signal(number)

    in_loss(monkeypatch, call, ask, training)


def killed_after(recipe: Recipe, step: int, folder: Path) -> Path:
    """Train as `python -m outrider.train` does, with a SIGKILL after a checkpoint of that step; return the last."""
    (folder / "killed.yaml").write_text(recipe.to_yaml())
    process = Forked(lambda: entry.main([str(folder / "killed.yaml")]), folder)
    saved, deadline = recipe.output_folder / "checkpoints", time.time() + 120
    while not (saved.exists() and (last := folders.last_complete(saved)) and folders.step_of(last) >= step):
        assert process.poll() is None, ("it ended by itself", process.communicate())
        assert time.time() < deadline, "no checkpoint in two minutes"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    reached = folders.last_complete(saved)
    assert reached is not None
    return reached


@pytest.fixture
def one_thread_as_forked() -> Iterator[None]:
    """A forked process has one thread: so sums are made in its order here, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of_stored(recipe: Recipe, stored: Path) -> Recipe:
    spec = recipe.target.model_validate({"path": str(stored), "dtype": "float32"})
    return recipe.model_copy(update={"target": spec})


@pytest.fixture
def stored(target: Target, tmp_path: Path) -> Path:
    """The target as a folder."""
    target.model.save_pretrained(tmp_path / "target")
    target.require_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture(scope="session")
def target(tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    """One target for all tests: training never changes it (a test asserts that)."""
    return Target(tiny_llama(vocab=len(tiny_tokenizer)), tiny_tokenizer)


@pytest.fixture
def tried(target: Target, precision: torch.dtype) -> Iterator[Target]:
    """That target, in the precision that a test is tried in."""
    if precision == torch.float64:
        with in_float64(target) as doubled:
            yield doubled
    else:
        yield target


@pytest.fixture(scope="session")
def rows(target: Target) -> list[dict[str, Any]]:
    return make_rows(target.vocab_size)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, target: Target, rows: list[dict[str, Any]]) -> Path:
    return write_data(tmp_path_factory.mktemp("distilled") / "data", rows, target)


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> Callable[..., Recipe]:
    """`recipe(name="run", drafter=…, data={…}, **training)`: logs every step, one global batch is 8 rows."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a, b):\n")

    def make(
        name: str = "run",
        drafter: dict[str, Any] | None = None,
        data_changes: dict[str, Any] | None = None,
        **training: Any,
    ) -> Recipe:
        values = {
            "max_steps": 12,
            "per_device_train_batch_size": 8,
            "learning_rate": 3e-3,
            "logging_steps": 1,
            "disable_tqdm": True,
            "save_steps": 4,
            "eval_steps": 4,
        }
        return Recipe.from_dict(
            {
                "name": name,
                "target": {"path": "in memory"},
                "drafter": drafter or EAGLE3,
                "data": {"prompts": [str(prompts)], "responses": str(data), "holdout": 0.1, **(data_changes or {})},
                "training": values | training,
                "output": str(tmp_path / "{name}"),
            }
        )

    return make
