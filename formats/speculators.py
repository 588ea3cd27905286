"""EAGLE-3 heads in the layout of the `speculators` package, which vLLM reads without further flags: written and read.

Its numbering of taps is ours: `eagle_aux_hidden_state_layer_ids` are HF `hidden_states` indices (SGLang and SpecForge
name the same tensors one lower: the output of layer i). Only the last one differs: it means the state before the
target's final norm, which `Target` does not give. `d2t` holds offsets: draft token i is target token i + d2t[i].
Positions start one later there, which rotary embeddings do not see.

Its own loader, and vLLM's, fill what is missing with defaults and random weights. So every flag is written, whatever
its default, and reading refuses whatever it would have to guess or drop.

Shapes: V target vocabulary, V' draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError
from ..common.versions import versions
from ..heads import Drafter, DrafterConfig, Eagle3, Eagle3Config
from ..targets import Target
from .drafter_files import DrafterFiles
from .layout import ExportLayout, Unsupported
from .llama import EMBEDDINGS, check_embeddings, layer_sizes, llama_config, shapes_of
from .load_weights import fill
from .reading import Flags, ProbeSequence, eagle3_logits, embedding_table

TAPS = "eagle_aux_hidden_state_layer_ids"
# How names of the taps' norms begin in the format, and ours; all other names are the same.
_TAP_NORMS = {False: ("fc_norm.", "tap_norms."), True: ("input_norm.", "tap_norms.0.")}  # by norm_before_fc
# What is there beside the head: the target's embeddings, two vocabulary maps, and copies that only training reads.
BESIDE = (EMBEDDINGS, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


# The version of the package whose layout this is; its loader compares nothing with it.
VERSION = "0.9.0"


class Speculators(ExportLayout):
    """EAGLE-3 heads as the `speculators` package keeps them.

    Args:
        embeddings: whether copies of the target's embeddings are written. `speculators` fills absent ones with
            uninitialised memory, vLLM takes the target's own.
    """

    name = "speculators"
    drafter = "eagle3"
    optional = BESIDE

    def __init__(self, embeddings: bool = True):
        self.embeddings = embeddings

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, Eagle3Config)
        return taps_lacking(config.taps, num_layers)

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, Eagle3)
        return write_eagle3(drafter, target, depth, self.embeddings)

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        layer, flags = vllm_flags(found.config, target.num_layers)
        return eagle3_logits(found.tensors, layer, flags, passage)

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return config.get("speculators_model_type") == "eagle3"

    def read(self, found: DrafterFiles, target: Target) -> Eagle3:
        return read_eagle3(found, target)

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        layer = config.get("transformer_layer_config") or {}
        has_qwen_layers = layer.get("model_type") == "qwen3"  # Llama's, with norms of queries and keys
        if has_qwen_layers:
            config = config | {"transformer_layer_config": layer | {"model_type": "llama"}}
        settings = Eagle3Config(**read_settings(config, "config.json", [], (0, 1, 2)))
        found = shapes_of(Eagle3, settings, lambda name: their_name(name, settings))
        if has_qwen_layers:
            parts = [f"layers.{i}.self_attn.{part}_norm.weight" for i in range(settings.num_layers) for part in "qk"]
            found |= dict.fromkeys(parts, (settings.head_dim,))
        return found


def taps_lacking(taps: Sequence[int], num_layers: int) -> list[Unsupported]:
    """Return what engines cannot do of these taps: they sort them, and know no state after the final norm."""
    found = f"taps: {list(taps)}"
    lacks = []
    if list(taps) != sorted(set(taps)):
        lacks.append(Unsupported(found, "engines take each once, in ascending order", f"taps: {sorted(set(taps))}"))
    if num_layers in taps:
        before = sorted({min(tap, num_layers - 1) for tap in taps})
        why = f"engines give the state {num_layers} before the target's final norm, and it was trained on that after it"
        lacks.append(Unsupported(found, why, f"taps: {before}"))
    return lacks


def vllm_flags(config: dict[str, Any], num_layers: int) -> tuple[dict[str, Any], Flags]:
    """Return the layers' config and the flags that vLLM takes from a config.json of this layout."""
    default = (2, num_layers // 2, num_layers - 3)
    flags = Flags(
        taps=tuple(config.get(TAPS) or default),
        norm_before_residual=bool(config.get("norm_before_residual", True)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
    return config["transformer_layer_config"], flags


# ------------------------------------------------------------ writing


def write_eagle3(head: Eagle3, target: Target, depth: int, embeddings: bool = True) -> DrafterFiles:
    """Return `head` in this layout.

    Args:
        depth: how many tokens an engine drafts that is told nothing else.
        embeddings: whether the target's are part of it. `speculators` fills absent ones with uninitialised memory, vLLM
            takes the target's own.
    """
    tensors = {their_name(name, head.config): tensor for name, tensor in head.state_dict().items()}
    tensors |= vocabulary_maps(tensors.pop("token_ids"), head.config.vocab_size)
    if embeddings:
        tensors[EMBEDDINGS] = embedding_table(target)
    return DrafterFiles(_written_config(head, target, depth), tensors)


def _written_config(head: Eagle3, target: Target, depth: int) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": verifier(target),
        },
        # vLLM keeps of all this the layer's config and the fields named below it; it counts taps by this one.
        "transformer_layer_config": llama_config(config) | {"num_aux_hidden_states": len(config.taps)},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.norm_taps,
        "norm_output": config.norm_output,
        TAPS: list(config.taps),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        "transformers_version": versions()["transformers"],
    }


def verifier(target: Target) -> dict[str, Any]:
    """Return what the layout says of the target."""
    return {"name_or_path": target.source.get("path") or "", "architectures": [type(target.model).__name__]}


def vocabulary_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` `[V']` and `t2d` `[V]` of a draft vocabulary's target ids `[V']`; none for the whole vocabulary."""
    if len(ids) == vocab_size:
        return {}
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": kept}


def their_name(name: str, config: Eagle3Config) -> str:
    """Return their name of our tensor: the inverse of `_our_name`."""
    theirs, ours = _TAP_NORMS[config.norm_before_fc]
    return theirs + name.removeprefix(ours) if name.startswith(ours) else name


# ------------------------------------------------------------ reading


def load_speculators(folder: str | Path, target: Target) -> Eagle3:
    """Return the EAGLE-3 head in `folder`, saved in this layout, as a drafter for `target`.

    Raises:
        BadInputError: no such checkpoint, another kind of one, or a damaged one.
        IncompatibleError: made for another target, or with an option that our head does not have.
    """
    return read_eagle3(DrafterFiles.load(folder), target)


def read_eagle3(found: DrafterFiles, target: Target) -> Eagle3:
    """Return the head of a checkpoint in this layout; raises as `load_speculators` does."""
    kind = found.config.get("speculators_model_type")
    if kind != "eagle3":
        raise BadInputError(
            f"{found.config_file}: expected an EAGLE-3 head (speculators_model_type: eagle3), found {kind!r}."
        )
    head = Eagle3(eagle3_config(found.config, target, str(found.config_file)))
    fill_eagle3(head, found.tensors, target, found.folder)
    return head.eval()


def eagle3_config(values: dict[str, Any], target: Target, where: str) -> Eagle3Config:
    """Return our config of theirs, a config.json of `speculators`.

    Raises:
        IncompatibleError: an option that our head does not have; all of them are named.
    """
    taps = values.get(TAPS) or (2, target.num_layers // 2, target.num_layers - 3)
    problems = ["embed_requires_grad: true"] if values.get("embed_requires_grad") else []
    if target.num_layers in taps:
        problems.append(f"tap {target.num_layers}, the target's last state before its final norm")
    return Eagle3Config(**read_settings(values, where, problems, taps))


def read_settings(values: dict[str, Any], where: str, problems: list[str], taps: Sequence[int] = ()) -> dict[str, Any]:
    """Return the settings of our head, from a config.json of `speculators`.

    Args:
        problems: what else of the head ours cannot do.
        taps: where it names none.
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


def fill_eagle3(head: Eagle3, theirs: dict[str, Tensor], target: Target, folder: Path) -> None:
    """Load the weights into `head`, each of them and nothing else, and check that it fits the target."""
    weights = {_our_name(name, head.config): tensor for name, tensor in theirs.items() if name not in BESIDE}
    weights["token_ids"] = draft_ids(theirs, head.config.draft_vocab_size, head.config.vocab_size, folder)
    check_embeddings(theirs.get(EMBEDDINGS), target, folder)
    # Ours are ascending: whatever the order there, ids and rows move together.
    order = weights["token_ids"].argsort()
    weights |= {name: weights[name][order] for name in ("token_ids", "lm_head.weight") if name in weights}
    fill(head, weights, [], str(folder))
    head.check(target)


def _our_name(name: str, config: Eagle3Config) -> str:
    """Return our name of their tensor; an unknown one stays as it is, and is refused as unexpected."""
    theirs, ours = _TAP_NORMS[config.norm_before_fc]
    return ours + name.removeprefix(theirs) if name.startswith(theirs) else name


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
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        raise BadInputError(
            f"{folder}: d2t does not name {len(ids)} different tokens of the {vocab_size} (it holds offsets: "
            "token i + d2t[i])."
        )
    kept[ids] = True
    if "t2d" in theirs and not torch.equal(kept, theirs["t2d"].bool()):
        raise BadInputError(f"{folder}: d2t and t2d name different tokens.")
    return ids
