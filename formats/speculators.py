"""EAGLE-3 and P-EAGLE heads in the layout of the `speculators` package, which vLLM reads without further flags.

Its numbering of taps is ours: `eagle_aux_hidden_state_layer_ids` are HF `hidden_states` indices. Only the last one
differs: it means the state before the target's final norm, which `Target` does not give. `d2t` holds offsets: draft
token i is target token i + d2t[i]. Positions start one later there, which rotary embeddings do not see.

A P-EAGLE head has an EAGLE-3 head's tensors, and a vector and a token for its masks.

Its own loader, and vLLM's, fill what is missing with defaults and random weights. So every flag is written, whatever
its default, and reading refuses whatever it would have to guess or drop.

Shapes: V target vocabulary, V' draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..common.runtime import versions
from ..heads import DFlash, Eagle3, Eagle3Config, PEagle, PEagleConfig
from ..targets import Target
from .base_layout import DrafterFiles, ExportLayout, Fields, Unsupported, fill, with_prefix
from .compression import PRECISIONS
from .engine_logits import Flags, ProbeSequence, eagle3_logits, embedding_table, peagle_logits
from .llama import EMBEDDINGS, check_embeddings, layer_sizes, llama_config, require_fields, shapes_of

TAPS, MASK = "eagle_aux_hidden_state_layer_ids", "mask_token_id"
# How names of the taps' norms begin in the format, and ours; all other names are the same.
_TAP_NORMS = {False: ("fc_norm.", "tap_norms."), True: ("input_norm.", "tap_norms.0.")}  # by norm_before_fc
# Tensors beside the head: the target's embeddings, two vocabulary maps, and copies that only training reads.
BESIDE = (EMBEDDINGS, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
VERSION = "0.9.0"  # of the package whose layout this is; its loader compares nothing with it


class Speculators(ExportLayout[Eagle3, Eagle3Config]):
    """EAGLE-3 heads as the `speculators` package keeps them.

    `embeddings`: whether copies of the target's embeddings are written. `speculators` fills absent ones with
    uninitialised memory, vLLM takes the target's own.
    """

    name = "speculators"
    drafter = "eagle3"
    precisions = PRECISIONS
    has_output = True
    optional: ClassVar[tuple[str, ...]] = BESIDE
    head: ClassVar[type[Eagle3]] = Eagle3
    architecture: ClassVar[str] = "Eagle3DraftModel"

    def __init__(self, embeddings: bool = True):
        self.embeddings = embeddings

    def lacks(self, config: Eagle3Config, num_layers: int) -> list[Unsupported]:
        return taps_lacking(config.taps, num_layers)

    def write(self, drafter: Eagle3, target: Target, depth: int) -> DrafterFiles:
        config = drafter.config
        tensors = {their_name(name, config): tensor for name, tensor in drafter.state_dict().items()}
        tensors |= vocabulary_maps(tensors.pop("token_ids"), config.vocab_size)
        if self.embeddings:
            tensors[EMBEDDINGS] = embedding_table(target)
        fields = {
            "target_hidden_size": config.hidden_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.norm_taps,
            "norm_output": config.norm_output,
            TAPS: list(config.taps),
            "embed_requires_grad": False,
        }
        # vLLM keeps of all fields the layer's config and those named below it; it counts taps by this one.
        layer = llama_config(config, config.sliding_window) | {"num_aux_hidden_states": len(config.taps)}
        return DrafterFiles(written_config(drafter, target, depth, self.architecture, layer, fields), tensors)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        layer, flags = vllm_flags(files.config, target.num_layers)
        return eagle3_logits(files.tensors, layer, flags, passage)

    def listed_taps(self, config: Fields) -> tuple[str, list[int] | None]:
        return TAPS, config.get(TAPS)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return config.get("speculators_model_type") == self.drafter

    def read(self, files: DrafterFiles, target: Target) -> Eagle3:
        kind, where = files.config.get("speculators_model_type"), str(files.config_file)
        if kind != self.drafter:
            raise BadInputError(
                f"{where}: expected a head of the kind {self.drafter} (speculators_model_type), found {kind!r}."
            )
        head = self.head(self.settings(files.config, where, target.num_layers))
        config, theirs = head.config, files.tensors
        old, new = _TAP_NORMS[config.norm_before_fc]
        weights = {with_prefix(name, old, new): tensor for name, tensor in theirs.items() if name not in BESIDE}
        weights["token_ids"] = draft_ids(theirs, config.draft_vocab_size, config.vocab_size, files.folder)
        check_embeddings(theirs.get(EMBEDDINGS), target, files.folder)
        # Ours are ascending: whatever the order there, ids and rows move together.
        order = weights["token_ids"].argsort()
        weights |= {name: weights[name][order] for name in ("token_ids", "lm_head.weight") if name in weights}
        fill(head, weights, [], str(files.folder))
        head.check(target)
        return head.eval()

    def settings(self, values: dict[str, Any], where: str, num_layers: int) -> Eagle3Config:
        """Return our config of theirs, a config.json of `speculators`.

        Raises IncompatibleError for options that our head does not have; all of them are named.
        """
        taps = values.get(TAPS) or _default_taps(num_layers)
        problems = ["embed_requires_grad: true"] if values.get("embed_requires_grad") else []
        problems += last_tap(taps, num_layers)
        return Eagle3Config(**read_settings(values, where, problems, taps))

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        layer = config.get("transformer_layer_config") or {}
        has_qwen_layers = layer.get("model_type") == "qwen3"  # Llama's, with norms of queries and keys
        if has_qwen_layers:
            config = config | {"transformer_layer_config": layer | {"model_type": "llama"}}
        settings = Eagle3Config(**read_settings(config, "config.json", [], (0, 1, 2)))
        shapes = shapes_of(Eagle3, settings, lambda name: their_name(name, settings))
        if has_qwen_layers:
            parts = [f"layers.{i}.self_attn.{part}_norm.weight" for i in range(settings.num_layers) for part in "qk"]
            shapes |= dict.fromkeys(parts, (settings.head_dim,))
        return shapes


class SpeculatorsPEagle(Speculators):
    """P-EAGLE heads as the `speculators` package keeps them.

    Its loader fills embeddings that are missing with uninitialised memory, so they are written. There they may be
    trained; ours are the target's, and others are refused.
    """

    name = "speculators-peagle"
    drafter = "peagle"
    precisions = ()
    head = PEagle
    architecture = "PEagleDraftModel"

    def write(self, drafter: Eagle3, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, PEagle)
        if drafter.mask is not None:
            raise IncompatibleError(
                "this peagle drafter has learned the embedding of its mask, and others embed a token in its place; "
                "train it with a drafter.mask_token_id that no text has."
            )
        written = super().write(drafter, target, depth)
        return replace(written, config=written.config | {MASK: drafter.config.mask_token_id})

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        layer, flags = vllm_flags(files.config, target.num_layers)
        return peagle_logits(files.tensors, layer, flags, int(files.config[MASK]), passage)

    def settings(self, values: dict[str, Any], where: str, num_layers: int = 0) -> PEagleConfig:
        require_fields(values, (MASK, TAPS), where)
        settings = read_settings(values, where, last_tap(values[TAPS], num_layers))
        return PEagleConfig(**settings, mask_token_id=int(values[MASK]))

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        settings = self.settings(config, "config.json")
        return shapes_of(PEagle, settings, lambda name: their_name(name, settings))


def taps_lacking(taps: Sequence[int], num_layers: int) -> list[Unsupported]:
    """Return the taps that engines cannot use: they sort them, and have no state after the final norm."""
    setting = f"taps: {list(taps)}"
    lacks = []
    if list(taps) != sorted(set(taps)):
        lacks.append(Unsupported(setting, "engines take each once, in ascending order", f"taps: {sorted(set(taps))}"))
    if num_layers in taps:
        before = sorted({min(tap, num_layers - 1) for tap in taps})
        why = f"engines give the state {num_layers} before the target's final norm, and it was trained on that after it"
        lacks.append(Unsupported(setting, why, f"taps: {before}"))
    return lacks


def last_tap(taps: Sequence[int], num_layers: int) -> list[str]:
    """Return in words that a file taps the last of a target's layers, of which there are `num_layers`; [] if not.

    Engines hand on the state before the final norm, and libraries the one after it; files do not say by which they were
    trained. Ours is after it.
    """
    said = f"tap {num_layers}, the target's last state before its final norm in engines, after it in libraries"
    return [said] if num_layers and num_layers in taps else []


def tapped_embeddings(taps: Sequence[int]) -> Unsupported:
    """Return the lack of engines that cannot tap the embeddings."""
    nearest = f"taps: {sorted({max(tap, 1) for tap in taps})}"
    return Unsupported(f"taps: {list(taps)}", "it taps outputs of layers, not embeddings", nearest)


def vllm_flags(config: Fields, num_layers: int) -> tuple[dict[str, Any], Flags]:
    """Return the layers' config and the flags that vLLM takes from a config.json of this layout."""
    flags = Flags(
        taps=tuple(config.get(TAPS) or _default_taps(num_layers)),
        norm_before_residual=bool(config.get("norm_before_residual", True)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
    return config["transformer_layer_config"], flags


def _default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the taps that engines use where config.json names none."""
    return (2, num_layers // 2, num_layers - 3)


def written_config(
    drafter: Eagle3 | DFlash,
    target: Target,
    depth: int,
    architecture: str,
    layer: dict[str, Any],
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the config.json of a drafter, for every kind that the package has.

    Args:
        depth: the tokens that an engine drafts if it is told nothing else.
        layer: the config of its layers.
        fields: the settings of this kind.
    """
    method = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target.place, "architectures": [type(target.model).__name__]}
    return {
        "architectures": [architecture],
        "model_type": "speculators",
        "speculators_model_type": drafter.name,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": drafter.name,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": drafter.config.draft_vocab_size,
        **fields,
        "tie_word_embeddings": False,
        "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        "transformers_version": versions()["transformers"],
    }


def read_settings(values: dict[str, Any], where: str, problems: list[str], taps: Sequence[int] = ()) -> dict[str, Any]:
    """Return the settings of our head, from a config.json of `speculators`.

    Args:
        problems: other features of the head that ours lacks.
        taps: those of a config that names none.
    """
    sizes = layer_sizes(values.get("transformer_layer_config", {}), where, problems)
    proposals = values.get("speculators_config", {}).get("proposal_methods") or [{}]
    return {
        "taps": tuple(values.get(TAPS) or taps),
        "steps": int(proposals[0].get("speculative_tokens") or Eagle3Config.steps),
        "draft_vocab_size": int(values.get("draft_vocab_size") or sizes["vocab_size"]),
        "norm_taps": bool(values.get("fc_norm")),
        "norm_output": bool(values.get("norm_output")),
        "norm_before_fc": bool(values.get("norm_before_fc")),
        "norm_before_residual": bool(values.get("norm_before_residual")),
        **sizes,
    }


def their_name(name: str, config: Eagle3Config) -> str:
    """Return the layout's name of our tensor."""
    theirs, ours = _TAP_NORMS[config.norm_before_fc]
    return with_prefix(name, ours, theirs)


def vocabulary_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` `[V']` and `t2d` `[V]` of a draft vocabulary's target ids `[V']`; none for the whole vocabulary."""
    if len(ids) == vocab_size:
        return {}
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": kept_tokens(ids, vocab_size)}


def kept_tokens(ids: Tensor, vocab_size: int) -> Tensor:
    """Return the mask `[V]` of the tokens among `ids`."""
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[ids[(ids >= 0) & (ids < vocab_size)].cpu()] = True
    return kept


def are_tokens(ids: Tensor, vocab_size: int) -> bool:
    """Return whether `ids` are different tokens of the vocabulary."""
    return bool(ids.min() >= 0 and ids.max() < vocab_size) and len(ids.unique()) == len(ids)


def draft_ids(theirs: dict[str, Tensor], draft_vocab_size: int, vocab_size: int, folder: Path) -> Tensor:
    """Return the target id of each draft token, `[V']`, of a checkpoint's tensors."""
    every = torch.arange(draft_vocab_size)
    if "d2t" not in theirs:
        if draft_vocab_size < vocab_size:
            raise BadInputError(
                f"{folder}: d2t is missing, but the draft vocabulary has {draft_vocab_size} of {vocab_size} tokens."
            )
        return every
    offsets = theirs["d2t"]
    if offsets.shape != every.shape:
        raise BadInputError(f"{folder}: d2t has the shape {tuple(offsets.shape)}, expected {tuple(every.shape)}.")
    ids = every + offsets.long()
    if not are_tokens(ids, vocab_size):
        raise BadInputError(
            f"{folder}: d2t does not name {len(ids)} different tokens of the {vocab_size} (it holds offsets: "
            "token i + d2t[i])."
        )
    if "t2d" in theirs and not torch.equal(kept_tokens(ids, vocab_size), theirs["t2d"].bool()):
        raise BadInputError(f"{folder}: d2t and t2d name different tokens.")
    return ids
