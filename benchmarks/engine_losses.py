"""Losses of a head that learns from an engine's hidden states, beside those of one that learns from the target's own.

    python -m benchmarks.engine_losses --python ~/vllm --work build/losses --out engine-losses-cpu-fp32.json

The same rows, first weights and order; the states are a vLLM's, or those of the loaded target. The control are the
loaded target's states with noise of the engine's size. Whatever an optimizer makes of rounding it makes
of that noise, too: so the losses part as far, and under another optimizer otherwise. Nothing is timed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.distill import distill
from outrider.distill.features import TargetPasses
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import train

from .launches import losses
from .report import command, conditions, options, publish, table

STEPS = 100
SHOWN = (1, 2, 3, 5, 10, 20, 50, 100)
CHANGES = ["data.limit=24", "data.max_new_tokens=48", "data.features=cached", "data.holdout=0"]
CHANGES += [f"training.max_steps={STEPS}", "training.logging_steps=1", "training.save_steps=1000"]
CHANGES += ["training.eval_strategy=no", "training.bf16=false"]
OPTIMIZERS = {
    "Muon, as in the recipe": [],
    "SGD without momentum, 0.05": ["training.optim=sgd", "training.learning_rate=0.05"],
}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--python", required=True, help="the environment that vLLM is installed in")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs; those that are there are kept")
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    given = parser.parse_args()
    data = distill(load_recipe("embedded-eagle3", [*CHANGES, f"output={given.work}/answers"]))
    target = Target.load("embedded", dtype="float32", device="cpu")
    made = {"engine": {"python": given.python, "check": "forward"}, "plain": None}
    stores: dict[str, Path] = {}
    for name, engine in made.items():
        stores[name] = _trained(given.work / name, data, target, [], engine=engine).output_folder / "features"
    noise = _distance(stores["engine"], stores["plain"])
    for seed in range(given.seeds):
        name = f"noise-{seed}"
        with patch.object(TargetPasses, "of", _noisy(noise, seed)):
            stores[name] = _trained(given.work / name, data, target, []).output_folder / "features"
    rows = []
    for optimizer, changes in OPTIMIZERS.items():
        of = {}
        for name, store in stores.items():
            output = given.work / f"{name}-{len(rows)}" if changes else given.work / name
            of[name] = losses(_trained(output, data, target, changes, store, made.get(name)).output_folder)
        rows.append({"optimizer": optimizer, "first": of["plain"][0], "last": of["plain"][-1]} | _growth(of))
    result = {"conditions": conditions(target, steps=STEPS), "states": noise, "optimizers": rows}
    publish(result, given.out, [_table(result)])
    return 0


def _trained(
    output: Path,
    data: Path,
    target: Target,
    changes: list[str],
    store: Path | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Recipe:
    """Train, unless it was done; `store` are features to learn from."""
    recipe = load_recipe("embedded-eagle3", [*CHANGES, *changes, f"output={output}", f"data.responses={data}"])
    if engine is not None:
        values = recipe.model_dump()
        recipe = Recipe.from_dict(values | {"target": values["target"] | {"engine": dict(engine)}})
    if store is not None and not (output / "features").exists():
        shutil.copytree(store, output / "features")
    if not (output / "provenance.json").exists():
        train(recipe, None if engine is not None else target)
    return recipe


def _noisy(size: float, seed: int) -> Any:
    """Return what takes the place of `TargetPasses.of`, with noise of that size, relative to each number."""
    passes, generator = TargetPasses.of, torch.Generator().manual_seed(seed)

    def of(self: TargetPasses, rows: Any) -> Iterator[tuple[int, Any, Any]]:
        def rounded(states: Tensor | None) -> Tensor | None:
            return None if states is None else states * (1 + size * torch.randn(states.shape, generator=generator))

        return ((i, rounded(hidden), rounded(last)) for i, hidden, last in passes(self, rows))

    return of


def _distance(one: Path, other: Path) -> float:
    """Return how far the states of two stores differ, relative to their norm."""
    ours, theirs = (load_file(next(store.glob("*/states-00000.safetensors"))) for store in (one, other))
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in ("last", "hidden"))


def _growth(of: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the largest relative difference from the plain training up to each of some steps: engine, and control."""
    plain = torch.tensor(of["plain"], dtype=torch.float64)
    apart = {n: ((torch.tensor(v, dtype=torch.float64) - plain) / plain).abs().cummax(0).values for n, v in of.items()}
    control = torch.stack([values for name, values in apart.items() if name.startswith("noise")])
    return {
        "engine": {str(step): float(apart["engine"][step - 1]) for step in SHOWN},
        "noise": {str(step): [float(v) for v in control[:, step - 1].aminmax()] for step in SHOWN},
    }


def _table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["optimizers"]:
        rows.append([row["optimizer"], "engine", *(f"{row['engine'][str(step)]:.1e}" for step in SHOWN)])
        rows.append(["", "noise", *("{:.1e} to {:.1e}".format(*row["noise"][str(step)]) for step in SHOWN)])
    return table(["optimizer", "states", *(f"step {step}" for step in SHOWN)], rows)


if __name__ == "__main__":
    sys.exit(command(main))
