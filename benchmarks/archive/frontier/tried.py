"""Changes of training that the package does not have, beside the recipes as they are: none of them is in a recipe.

    python -m benchmarks.archive.frontier.tried embedded-eagle1 training.bf16=true --seconds 180 \\
        --vary trick=none --vary trick=ema …

`benchmarks.ablation`, whose variants may name a trick:

    ema     the mean of all weights so far is kept, and drafts at the end (decay 0.99, less in the first steps)
    wide    each linear layer is W + A·B while it learns, A with twice as many columns as inputs, and one matrix after
    focal   the first draft of a block that the target would not have taken counts twice (arXiv 2606.11552); for EAGLE,
            the features of every token that would not have been taken
    order   packs are drawn from the easiest for the target only, in the beginning from a tenth of them, and from all of
            them after half of the time (arXiv 1903.09848)
    fade    EAGLE-1's loss on features weighs twice as much in the beginning, and nothing at the end: first the
            features, then the tokens
    accept  the loss on tokens is cross-entropy for half of the time, and lk_hybrid then: first the distribution, then
            what is accepted of it
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import TrainerCallback

from outrider.heads import base, eagle
from outrider.heads.block import block_losses
from outrider.recipes import Recipe, load_recipe
from outrider.train import run, train
from outrider.train.data import Order

from ... import ablation
from ...report import command


class Ema(TrainerCallback):
    """Keeps the exponential mean of a drafter's weights."""

    def __init__(self, drafter: nn.Module):
        self.weights = [p for p in drafter.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.weights]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        decay = min(0.99, (1 + state.global_step) / (10 + state.global_step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.weights], 1 - decay)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        for weight, mean in zip(self.weights, self.mean, strict=True):
            weight.data.copy_(mean)


class Wide(nn.Module):
    """W + A·B in place of W, at first W."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(outputs, 2 * inputs))
        self.b = nn.Parameter(torch.randn(2 * inputs, inputs) / inputs**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Merge(TrainerCallback):
    """Makes one matrix of what was wide."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = layers
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", Wide(*layer.weight.shape))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        for layer in self.layers:
            parametrize.remove_parametrizations(layer, "weight")


@torch.no_grad()
def _by_difficulty(trainer: Any) -> list[int]:
    """Return the positions of the training's packs, those first whose tokens the target itself is the surest of."""
    data, target = trainer.data.training, trainer.data.batches.target

    def surprise(position: int) -> float:
        lost, tokens = 0.0, 0
        for row in data.groups[position]:
            read = torch.tensor(data.rows[row]["input_ids"])
            log_probs = target.lm_head(target.forward(read[None], logits=False).last[0, :-1]).float().log_softmax(-1)
            lost, tokens = lost - float(log_probs.gather(1, read[1:, None]).sum()), tokens + len(read) - 1
        return lost / tokens

    return sorted(range(len(data)), key=surprise)


def _ordered(trainer: Any) -> Callable[[Any], Iterator[int]]:
    """Return `Order.__iter__` that draws from more and more of the packs."""
    order, chance = _by_difficulty(trainer), random.Random(trainer.args.seed)

    def draws(self: Any) -> Iterator[int]:
        if trainer.share >= 0.5:
            yield from iterate(self)
            return
        for _ in range(len(self)):
            competence = min(1.0, (0.01 + 0.99 * 2 * trainer.share) ** 0.5)
            yield order[chance.randrange(max(1, round(competence * len(order))))]

    iterate = Order.__iter__
    return draws


def _in_sequence(trainer: Any, trick: str) -> Any:
    """Return the patch of losses that change as the training goes on."""
    if trick == "fade":
        feature_loss = eagle.FeatureDrafter.feature_loss

        def faded(drafter: Any, outputs: Tensor, features: Tensor) -> Tensor:
            return feature_loss(drafter, outputs, features) * 2 * (1 - trainer.share)

        return patch.object(eagle.FeatureDrafter, "feature_loss", faded)
    named = base.divergence

    def later(loss: dict[str, float]) -> Any:
        return named(loss if trainer.share < 0.5 else {"lk_hybrid": sum(loss.values())})

    return patch.object(base, "divergence", later)


def _trainer(make: Callable[..., Any], trick: str, stack: ExitStack) -> Callable[..., Any]:
    """Return `_Training.trainer` with a callback or a patch more."""

    def made(training: Any, data: Any, drafter: Any, adapter: Any) -> Any:
        made_for, callbacks = run.made_for, []

        def widened(*args: Any) -> Any:
            drafter = made_for(*args)
            if trick == "wide":
                linear = [m for m in drafter.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
                callbacks.append(Merge(linear))
            return drafter

        with patch.object(run, "made_for", widened):
            trainer = make(training, data, drafter, adapter)
        if trick == "ema":
            callbacks.append(Ema(trainer.drafter))
        if trick == "order":
            stack.enter_context(patch.object(Order, "__iter__", _ordered(trainer)))
        if trick in ("fade", "accept"):
            stack.enter_context(_in_sequence(trainer, trick))
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer

    return made


@contextmanager
def _focal(drafts: int) -> Iterator[None]:
    """Weigh first errors twice."""
    compare, compare_drafts = block_losses.compare, eagle.compare_drafts
    feature_loss, seen = eagle.FeatureDrafter.feature_loss, {}

    def compared(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss, alpha, top1 = compare(*args)
        wrong = (1 - top1).view(-1, drafts)
        first = wrong * (wrong.cumsum(1) == 1)
        return loss * (1 + first.flatten()), alpha, top1

    def kept(*args: Any) -> Any:
        seen["top1"] = (found := compare_drafts(*args)).top1
        return found

    def focused(drafter: Any, outputs: Tensor, features: Tensor) -> Tensor:
        return feature_loss(drafter, outputs, features) * (2 - seen["top1"])

    with (
        patch.object(block_losses, "compare", compared),
        patch.object(eagle, "compare_drafts", kept),
        patch.object(eagle.FeatureDrafter, "feature_loss", focused),
    ):
        yield


def _train(recipe: Recipe, *args: Any, **kwargs: Any) -> Any:
    trick = re.search("trick=([a-z]+)", recipe.output)
    with ExitStack() as stack:
        if trick and trick[1] == "focal":
            stack.enter_context(_focal(recipe.drafter.get("block_size", 2) - 1))
        elif trick:
            stack.enter_context(
                patch.object(run._Training, "trainer", _trainer(run._Training.trainer, trick[1], stack))
            )
        return train(recipe, *args, **kwargs)


def _load(name: str, changes: Sequence[str]) -> Recipe:
    return load_recipe(name, [change for change in changes if not change.startswith("trick=")])


def main(given: Sequence[str] | None = None) -> int:
    with patch.object(ablation, "train", _train), patch.object(ablation, "load_recipe", _load):
        return ablation.main(given)


if __name__ == "__main__":
    sys.exit(command(main))
