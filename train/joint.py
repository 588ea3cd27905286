"""Joint training: the target learns beside the drafter, through a LoRA of peft's (Medusa-2, arXiv 2401.10774 §2.2.2).

Minimised, per supervised position: L_target + λ0 · L_drafter. L_target holds the target: the divergence of its
next-token distribution with the adapter from the one without (the paper's self-distillation), or the cross-entropy with
the responses. L_drafter is the drafter's own loss, on the hidden states of the target with the adapter; what it
compares its drafts with has no gradient. In the first part of the training the drafter learns alone: fresh heads'
gradients would distort the target.

The adapter is a part of the target that comes out: decoding is lossless with respect to that one, not to the original.

Shapes: B rows, T tokens, P supervised positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..common import BadInputError, IncompatibleError, refuse_unknown_keys
from ..heads import Drafter, DrafterLoss, TargetBatch
from ..heads.losses import LossSettings, chunked_compare, divergence, own_precision
from ..recipes import JointSpec
from ..targets import Target
from ..targets.model_folder import refuse_pickles
from ..targets.peft_adapters import ADAPTER_WEIGHTS
from .data import IGNORED, Batches, OnlineBatches

ADAPTER = "adapter"

# Fields of LoraConfig that would train, move or rewrite more of the target than a LoRA, and what is said of them.
_MEANINGLESS = {
    "modules_to_save": "whole modules are not trained, the adapter is a LoRA",
    "trainable_token_indices": "the drafter starts from the target's embeddings as they are",
    "layer_replication": "the target keeps its layers: the drafter reads them by number",
    "loftq_config": "it starts from other weights than the target's",
    "corda_config": "it starts from other weights than the target's",
    "eva_config": "it needs data before the training",
    "lora_ga_config": "it needs data before the training",
    "arrow_config": "it routes between adapters that are there already",
    "alora_invocation_tokens": "such an adapter cannot be merged, so no target could be loaded with it",
    "lora_bias": "such an adapter cannot be merged where layers have no bias",
}
_SET_HERE = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
_SET_HERE |= {"inference_mode", "runtime_config"}


def lora_config(values: dict[str, Any]) -> LoraConfig:
    """Return `joint.lora` as peft's own config; refuse fields without meaning here, and what peft refuses."""
    refuse_unknown_keys(values, {f.name for f in fields(LoraConfig)} - _SET_HERE, "joint.lora")
    for name, reason in _MEANINGLESS.items():
        if values.get(name):
            raise BadInputError(f"joint.lora.{name}: leave it out: {reason}.")
    if values.get("bias", "none") != "none":
        raise BadInputError(
            f"joint.lora.bias: expected 'none', found {values['bias']!r}: without the adapter the target must be what "
            "it was."
        )
    if values.get("init_lora_weights", True) not in (True, "gaussian"):
        raise BadInputError(
            "joint.lora.init_lora_weights: expected true or 'gaussian' (a new adapter changes nothing), found "
            f"{values['init_lora_weights']!r}."
        )
    rank = values.get("r", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise BadInputError(f"joint.lora.r: expected an integer >= 1, found {rank!r}.")
    try:
        return LoraConfig(task_type="CAUSAL_LM", **values)
    except (ValueError, TypeError) as error:
        raise BadInputError(f"joint.lora: {error}") from error


class Adapter:
    """A new LoRA inside of a target, whose passes go through it until it is taken out. New, it changes nothing.

    Attributes:
        learns: whether it is trained by now. Once it is, it stays so: a run that goes on for longer does not make it
            new again.
    """

    def __init__(self, target: Target, settings: dict[str, Any]):
        if getattr(target.model, "peft_config", None):
            raise IncompatibleError(
                "joint: the target already carries an adapter; merge it first (merge_and_unload), and train on the "
                "result."
            )
        self.target, self.learns = target, False
        try:
            self._model: Any = get_peft_model(target.model, lora_config(settings))
        except (ValueError, TypeError) as error:
            for name, module in list(target.model.named_modules()):  # what is left of it is taken out
                if isinstance(module, BaseTunerLayer):
                    target.model.set_submodule(name, module.get_base_layer())
            raise BadInputError(f"joint.lora does not fit this target: {error}") from error
        self._inside = True
        self._model.eval()
        ends = {"input": target.model.get_input_embeddings(), "output": target.model.get_output_embeddings()}
        for name, module in ends.items():
            if any(p.requires_grad for p in module.parameters()):
                self.remove()
                raise BadInputError(
                    f"joint.lora.target_modules names the target's {name} embedding, which the drafter takes as it is; "
                    "leave it out, for example with target_modules: all-linear."
                )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def off(self) -> AbstractContextManager[None]:
        """Return a context manager inside of which the target is the original."""
        return cast(AbstractContextManager[None], self._model.disable_adapter())

    def train(self, mode: bool) -> None:
        """Switch the LoRA's dropout; the target's own stays off."""
        for layer in self._model.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout.train(mode)

    def save(self, path: str | Path) -> None:
        """Write it as peft does; `Target.load(…, adapter=path)` reads it."""
        self._model.save_pretrained(str(path), save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        """Read the weights that `save` wrote; refuse missing, damaged, or other ones."""
        refuse_pickles(folder)
        try:
            loaded: Any = set_peft_model_state_dict(self._model, load_file(folder / ADAPTER_WEIGHTS))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadInputError(
                f"the adapter in {folder} cannot be continued: {str(error).splitlines()[0]} Start over (--fresh)."
            ) from error
        if loaded.unexpected_keys or any("lora_" in name for name in loaded.missing_keys):
            raise BadInputError(
                f"the adapter in {folder} has other layers than this run's; choose another output, or start over "
                "(--fresh)."
            )
        self.learns = any(bool(weight.any()) for name, weight in self._model.named_parameters() if "lora_B" in name)

    def remove(self) -> None:
        """Make the target the original again."""
        if self._inside:
            self._model.unload()
            vars(self.target.model).pop("peft_config", None)  # peft 0.18 leaves it there
            self._inside = False


@contextmanager
def adapted(target: Target, spec: JointSpec | None, seed: int) -> Iterator[Adapter | None]:
    """Put a new adapter into `target` while this is open; yield None without a `joint:` section."""
    if spec is None:
        yield None
        return
    if target.source.get("adapter"):
        raise BadInputError(
            f"joint: the target was loaded with the adapter {target.source['adapter']!r}, and a pair's target has one "
            "adapter; save the merged target, and train on that."
        )
    if target.sharded:
        raise BadInputError(
            "joint: an adapter cannot be trained in a target whose layers are spread over processes; give every "
            "process the whole target."
        )
    torch.manual_seed(seed)
    adapter = Adapter(target, spec.lora)
    try:
        yield adapter
    finally:
        adapter.remove()


@dataclass
class JointBatch(TargetBatch):
    """A batch with a gradient; `original` states `[B, T, H]` have none, and are None while the drafter learns alone."""

    original: Tensor | None = None


@dataclass
class JointBatches(Batches):
    """A maker of batches of hidden states by the target with its adapter, and without; see `OnlineBatches`."""

    target: Target
    taps: tuple[int, ...]
    adapter: Adapter
    precision: torch.dtype | None = None

    def of(self, inputs: dict[str, Tensor]) -> JointBatch:
        tokens, supervised = inputs["input_ids"], inputs["labels"] != IGNORED
        with self.adapter.off():
            before = OnlineBatches(self.target, self.taps, self.precision).of(inputs)
        if torch.is_grad_enabled() and not self.adapter.learns:  # a new adapter changes nothing
            return JointBatch(self.target, tokens, supervised, before.hidden, before.last)
        with torch.autocast(tokens.device.type, self.precision, enabled=self.precision is not None):
            out = self.target.forward(tokens, taps=self.taps, logits=False)
        return JointBatch(self.target, tokens, supervised, out.hidden, out.last, original=before.last)


class JointModule(nn.Module):
    """A module of what is trained: the drafter, and the adapter's parameters. The target is no part of it."""

    def __init__(self, drafter: Drafter, adapter: Adapter, spec: JointSpec):
        super().__init__()
        self.drafter = drafter
        self.lora = nn.ParameterList(adapter.parameters)
        self.spec, self.adapter = spec, adapter
        self._rule = divergence(spec.loss)

    def group(self) -> dict[str, Any]:
        """Return the adapter's group of an optimizer."""
        return {"params": list(self.lora), "lr": self.spec.learning_rate, "weight_decay": 0.0}

    def train(self, mode: bool = True) -> JointModule:
        self.adapter.train(mode)
        return super().train(mode)

    def forward(self, batch: JointBatch) -> DrafterLoss:
        """Return λ0 · the drafter's loss + the target's, with the drafter's metrics and `drafter_loss`.

        Three metrics compare the target with and without the adapter: `target_loss`, `target_alpha` (Σ min of both
        distributions) and `target_top1` (the share of positions with the same most probable token).
        """
        loss: DrafterLoss = self.drafter(batch)
        own = {"drafter_loss": (loss.total.detach(), loss.count)}
        weighted = replace(loss, total=self.spec.weight * loss.total, metrics=loss.metrics | own)
        if batch.original is None:
            return weighted
        rows, places = batch.supervised.nonzero(as_tuple=True)
        before, now = (states[rows, places - 1] for states in (batch.original, batch.last))
        settings = LossSettings(batch.target.lm_head, batch.target.lm_head, self._rule)
        # In full precision: what is compared differs by less than half-precision logits resolve.
        with own_precision(batch.last.device):
            kept = chunked_compare(before, now, settings, following=batch.tokens[rows, places])
        sums = {f"target_{name}": (getattr(kept, name).sum(), loss.count) for name in ("loss", "alpha", "top1")}
        return replace(weighted, total=weighted.total + kept.total, metrics=weighted.metrics | sums)


class Stages(TrainerCallback):
    """A callback that lets first the drafter learn alone, then both."""

    def __init__(self, adapter: Adapter, heads_first: float):
        self.adapter, self.heads_first = adapter, heads_first

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.adapter.learns = self.adapter.learns or state.global_step >= self.heads_first * state.max_steps
