"""Block drafters (DFlash, DFlash2 and DSpark) in the layout of the `speculators` package, which vLLM reads as it is.

Its taps are HF `hidden_states` indices, as ours; tensors have the names that ours have. The target's embeddings are
never part of it, an output embedding only where the draft vocabulary is pruned. A missing `sample_from_anchor` means
one thing for DFlash and another for DSpark, so it is always written.

The second part computes the draft logits of one block after a passage as engines do, from tensors by their names in the
files and dense masks. Nothing of our heads runs there.

Shapes: V target vocabulary, V' draft vocabulary, H hidden size, T processed tokens, S slots, k drafts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..common import IncompatibleError
from ..heads import DFlash, DFlash2, DFlashConfig, Drafter, DSpark, DSparkConfig
from ..targets import Target
from .base_layout import DrafterFiles, ExportLayout, Fields, Unsupported, fill, pruned_lacking
from .compression import PRECISIONS
from .engine_logits import Layers, ProbeSequence, Weights, output_table, require_unscaled, scale_field
from .llama import (
    EMBEDDINGS,
    check_embeddings,
    layer_sizes,
    llama_config,
    require_fields,
    require_same_rows,
    shapes_of,
)
from .speculators import draft_ids, last_tap, taps_lacking, vocabulary_maps, written_config

TAPS, OUTPUT = "aux_hidden_state_layer_ids", "lm_head.weight"
B = TypeVar("B", bound=DFlash)
C = TypeVar("C", bound=DFlashConfig)
# The logits of drafts `[k, V']` as an engine completes them: of tensors, flags, the passage, the fused hidden state
# before the root `[H]`, the drafts' states `[k, H]` and DFlash's logits `[k, V']`.
Completion = Callable[[Weights, "BlockFlags", ProbeSequence, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BlockKind:
    """A type of block drafters, as layouts see it.

    Attributes:
        drafter: its class.
        architecture: in published files.
        fields: of its settings beside DFlash's, the names in files, and what a missing one means; None: it may not be.
        completed: what engines do to DFlash's logits; None for nothing.
        whole: engines read its blocks whole, even where its layers are causal.
        served_as: see `ExportLayout`.
    """

    drafter: type[DFlash]
    architecture: str
    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    completed: Completion | None = None
    whole: bool = False
    served_as: str = "dflash"

    @property
    def name(self) -> str:
        return self.drafter.name

    def settings(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return its own settings, of the fields of a file; BadInputError if one is missing that may not be."""
        require_fields(fields, [name for name, missing in self.fields.values() if missing is None], where)
        kinds = {name: type(getattr(self.drafter.config_class, name)) for name in self.fields}
        return {ours: kinds[ours](fields.get(name, missing)) for ours, (name, missing) in self.fields.items()}

    def written(self, config: DFlashConfig) -> dict[str, Any]:
        """Return the fields of its own settings, which are the same in every layout."""
        return {name: getattr(config, ours) for ours, (name, _) in self.fields.items()}


class BlockLayout(ExportLayout[B, C]):
    """A layout of block drafters: tensors have our names, and config.json has the layers' sizes and a few flags."""

    beside: ClassVar[tuple[str, ...]] = ()  # tensors that our drafter does not have

    def __init__(self, kind: BlockKind):
        self.kind, self.drafter = kind, kind.name
        self.served_as = kind.served_as

    @abstractmethod
    def layer(self, config: Fields) -> dict[str, Any]:
        """Return the config of the layers, which is that of a Qwen3."""

    @abstractmethod
    def flags(self, config: Fields, where: str) -> BlockFlags:
        """Return the flags that engines take from a config.json of this layout.

        Raises BadInputError if it lacks a field that cannot be guessed.
        """

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        config = files.config
        flags = self.flags(config, str(files.config_file))
        return block_logits(files.tensors, self.layer(config), flags, passage, self.kind.completed)

    def read(self, files: DrafterFiles, target: Target) -> B:
        config = self.settings(files.config, str(files.config_file), target.num_layers)
        drafter: Any = self.kind.drafter(config)
        ours = {their_name(name): name for name in drafter.state_dict()}
        weights = {ours.get(name, name): t for name, t in files.tensors.items() if name not in self.beside}
        weights["token_ids"] = draft_ids(files.tensors, config.draft_vocab_size, config.vocab_size, files.folder)
        fill(drafter, weights, [], str(files.folder))
        check_embeddings(files.tensors.get(EMBEDDINGS), target, files.folder)
        if (output := files.tensors.get(OUTPUT)) is not None:
            require_same_rows(output, output_table(target)[drafter.token_ids], OUTPUT, files.folder)
        return drafter

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        return shapes_of(self.kind.drafter, self.settings(config, "config.json", 0), their_name)

    def settings(self, values: dict[str, Any], where: str, num_layers: int) -> DFlashConfig:
        """Return our config of theirs.

        Raises BadInputError or IncompatibleError if config.json lacks something, or asks for what our drafter cannot
        do.
        """
        flags, layer = self.flags(values, where), self.layer(values)
        require_fields(
            layer | (layer.get("rope_parameters") or layer.get("rope_scaling") or {}), ("rope_theta",), where
        )
        kinds = set(layer.get("layer_types") or ["full_attention"])
        problems = ["layers with a window and layers without one"] if len(kinds) > 1 else []
        problems += last_tap(flags.taps, num_layers)
        plain = layer | {"model_type": "llama", "layer_types": None}
        settings: dict[str, Any] = {
            "taps": flags.taps,
            "block_size": flags.slots,
            "from_anchor": flags.from_anchor,
            "causal": flags.causal,
            "sliding_window": flags.window or 0,
            "window_from": "anchor" if flags.window else "slot",
            "mask_token_id": flags.mask,
            "target_layers": num_layers,
            **flags.own,
            **layer_sizes({k: v for k, v in plain.items() if v is not None}, where, problems),
        }
        settings["draft_vocab_size"] = int(values.get("draft_vocab_size") or settings["vocab_size"])
        return self.kind.drafter.config_class(**settings)


class SpeculatorsBlocks(BlockLayout[DFlash, DFlashConfig]):
    """Block drafters as the `speculators` package keeps them.

    `vllm`: whether vLLM must be able to serve them.
    """

    name = "speculators-blocks"
    optional = beside = ("d2t", "t2d", OUTPUT, EMBEDDINGS)

    def __init__(self, kind: BlockKind, vllm: bool = False):
        super().__init__(kind)
        self.vllm = vllm
        self.precisions = PRECISIONS if vllm and kind.name == "dflash" else ()

    def lacks(self, config: DFlashConfig, num_layers: int) -> list[Unsupported]:
        lacks = taps_lacking(config.taps, num_layers)
        if config.sliding_window and self.vllm:
            # Its layout has one meaning (all slots of a block attend back to the same place), vLLM another: each slot's
            # window ends at that slot.
            why = "vLLM moves the window from slot to slot, which this layout cannot express"
            lacks.append(Unsupported(f"sliding_window: {config.sliding_window}", why, "sliding_window: 0"))
        elif config.sliding_window and config.window_from != "anchor":
            why = "it counts windows back from the block's first slot"
            lacks.append(Unsupported(f"window_from: {config.window_from}", why, "window_from: anchor"))
        if config.causal and not config.sliding_window:
            why = "layers that see all of the context see all of their block"
            nearest = f"causal: false{'' if self.vllm else ', or a sliding_window with it'}"
            lacks.append(Unsupported("causal: true", why, nearest))
        if config.from_anchor and self.drafter != "dspark":
            lacks.append(DRAFTS_FROM_ANCHOR)
        if self.drafter == "dflash2":
            lacks += pruned_lacking(config, "its selector knows all tokens")
        if isinstance(config, DSparkConfig) and not config.markov_rank:
            lacks.append(NO_MARKOV_HEAD)
        elif isinstance(config, DSparkConfig) and self.vllm and config.markov_head != "vanilla":
            setting = f"markov_head: {config.markov_head}"
            lacks.append(Unsupported(setting, "vLLM serves one kind", "markov_head: vanilla"))
        return lacks

    def write(self, drafter: DFlash, target: Target, depth: int) -> DrafterFiles:
        require_servable(drafter, target, depth, self.kind, scales=self.drafter == "dflash")
        config = drafter.config
        tensors = own_tensors(drafter) | vocabulary_maps(drafter.token_ids, config.vocab_size)
        if drafter.output_ids is not None:
            table = output_table(target)
            tensors[OUTPUT] = table[drafter.token_ids.to(table.device)]
        fields = {
            "block_size": config.block_size,
            TAPS: list(config.taps),
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not config.causal,
        }
        layer = layer_config(config) | scale_field(target)
        values = written_config(drafter, target, depth, self.kind.architecture, layer, fields)
        return DrafterFiles(values | self.kind.written(config), tensors)

    def read(self, files: DrafterFiles, target: Target) -> DFlash:
        if "sliding_attention" in (self.layer(files.config).get("layer_types") or []):
            require_fields(files.config, ("sliding_window_non_causal",), str(files.config_file))  # readers differ
        return super().read(files, target)

    def listed_taps(self, config: Fields) -> tuple[str, list[int] | None]:
        return TAPS, config.get(TAPS)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return config.get("speculators_model_type") == self.drafter

    def layer(self, config: Fields) -> dict[str, Any]:
        return dict(config["transformer_layer_config"])

    def flags(self, config: Fields, where: str) -> BlockFlags:
        require_fields(config, ("transformer_layer_config", TAPS, "mask_token_id", "block_size"), where)
        layer, kind = self.layer(config), config["speculators_model_type"]
        sliding = "sliding_attention" in (layer.get("layer_types") or [])
        return BlockFlags(
            taps=tuple(config[TAPS]),
            mask=int(config["mask_token_id"]),
            slots=int(config["block_size"]),
            from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
            causal=sliding and not config.get("sliding_window_non_causal", True),
            window=int(layer["sliding_window"]) if sliding else None,
            own=self.kind.settings(config, where),
        )


DRAFTS_FROM_ANCHOR = Unsupported(
    "from_anchor: true",
    "engines take DFlash's first slot for the root alone",
    "from_anchor: false, or a dspark drafter",
)
NO_MARKOV_HEAD = Unsupported(
    "markov_rank: 0", "its DSpark has a Markov head", "markov_rank: 1 or more, or a dflash drafter"
)


def own_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Return the drafter's tensors by their names in files, without the ids of its vocabulary, which layouts write."""
    return {their_name(name): tensor for name, tensor in drafter.state_dict().items() if name != "token_ids"}


def their_name(name: str) -> str:
    """Return the name of our tensor in files, where codebooks are tensors of no module."""
    return name.replace("codebook.weight", "codebook")


def require_servable(drafter: DFlash, target: Target, depth: int, kind: BlockKind, scales: bool = False) -> None:
    """Refuse a drafter that engines would run otherwise than it was trained.

    They embed a token in the place of its mask, and run a shorter block where fewer drafts are asked for, which gives
    other drafts. `scales`: whether they multiply logits by the `logit_scale` of its config.json.
    """
    if drafter.config.mask_token_id is None:
        raise IncompatibleError(
            f"this {drafter.name} drafter has learned its mask, and engines embed a token in its place; train it with "
            "a drafter.mask_token_id that no text has."
        )
    if not scales:
        require_unscaled(target, drafter.name)
    if depth != drafter.max_depth and (kind.whole or not drafter.config.causal):
        raise IncompatibleError(
            f"engines read as many slots as they draft, and a block of this {drafter.name} drafter is read whole: it "
            f"was trained for {drafter.max_depth} drafts, {depth} were asked for; export it with depth "
            f"{drafter.max_depth}{'' if drafter.config.causal else ', or train it with drafter.causal'}."
        )


def layer_config(config: DFlashConfig) -> dict[str, Any]:
    """Return a Qwen3's config.json for a block drafter's layers."""
    kind = "sliding_attention" if config.sliding_window else "full_attention"
    return llama_config(config) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": [kind] * config.num_layers,
        "use_sliding_window": bool(config.sliding_window),
        "sliding_window": config.sliding_window or None,
    }


@dataclass(frozen=True)
class BlockFlags:
    """The flags that an engine takes from config.json, beside the layers' sizes."""

    taps: tuple[int, ...]  # HF `hidden_states` indices
    mask: int  # the id of the mask token
    slots: int  # of a block
    from_anchor: bool  # slot i predicts the token after its place
    causal: bool  # a slot attends to the slots up to its own
    window: int | None = None  # of the context, counted back from the anchor; None for all of it
    own: Mapping[str, Any] = field(default_factory=dict)  # what the kind has beside DFlash's, by our names


@torch.no_grad()
def block_logits(
    tensors: Mapping[str, Tensor],
    layer: Mapping[str, Any],
    flags: BlockFlags,
    passage: ProbeSequence,
    completed: Completion | None,
) -> Tensor:
    """Return the draft logits at each depth, `[k, V]`, −inf outside the draft vocabulary.

    `layer`: the config of its layers.
    """
    weights = Weights(tensors, layer)
    context = torch.cat([passage.hidden[tap] for tap in flags.taps], -1)
    context = weights.norm(weights.linear(context, "fc"), "hidden_norm")
    ids = torch.full((flags.slots,), flags.mask, device=context.device)
    ids[0] = passage.tokens[-1]
    hidden, layers = functional.embedding(ids, passage.table.float()), _Blocks(weights, flags, len(context), ids.device)
    for index in range(int(layer["num_hidden_layers"])):
        hidden = layers(f"layers.{index}.", context, hidden)
    states = weights.norm(hidden, "norm")[0 if flags.from_anchor else 1 :][: 1 + len(passage.drafts)]
    scale = float(layer.get("logit_scale", 1.0))
    logits = scale * (weights.linear(states, "lm_head") if OUTPUT in weights else passage.lm_head(states))
    if completed is not None:
        logits = completed(weights, flags, passage, context[-1], states, logits)
    return weights.over_target(logits, len(passage.table))


class _Blocks(Layers):
    """Qwen3's decoder layers over a context and one block after it."""

    def __init__(self, weights: Weights, flags: BlockFlags, length: int, device: torch.device):
        super().__init__(weights, length + flags.slots, device)
        self.slots, every = flags.slots, torch.arange(length + flags.slots, device=device)
        self.visible = every >= (0 if flags.window is None else length - flags.window)
        self.visible = self.visible.expand(flags.slots, -1).clone()
        if flags.causal:
            self.visible &= every <= every[length:, None]

    def __call__(self, at: str, context: Tensor, hidden: Tensor) -> Tensor:
        """Return the output `[S, H]` of the layer whose names begin with `at`, for the context `[T, H]` and a block."""
        norm, grouped = self.weights.norm, self.heads > self.kv_heads
        entered = norm(hidden, f"{at}input_layernorm")
        if f"{at}attention_conv.base_kernel" in self.weights:
            entered = self._convolved(f"{at}attention_conv", 0, entered, entered)
        both = torch.cat([context, entered])
        q, k, v = (self.project(at, name, x) for name, x in (("q", entered), ("k", both), ("v", both)))
        q, k = (norm(x, f"{at}self_attn.{name}_norm") for name, x in (("q", q), ("k", k)))
        q, k = self.turned(q, len(context)), self.turned(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, self.visible, enable_gqa=grouped)
        return self.finish(at, mixed, hidden)

    def finish(self, at: str, mixed: Tensor, residual: Tensor) -> Tensor:
        if f"{at}mlp_conv.base_kernel" not in self.weights:
            return super().finish(at, mixed, residual)
        states = self.weights.norm(residual, f"{at}input_layernorm")
        hidden = residual + self._convolved(f"{at}attention_conv", 1, states, self.attended(at, mixed))
        states, conv = self.weights.norm(hidden, f"{at}post_attention_layernorm"), f"{at}mlp_conv"
        return hidden + self._convolved(conv, 1, states, self.feed(at, self._convolved(conv, 0, states, states)))

    def _convolved(self, name: str, side: int, states: Tensor, x: Tensor) -> Tensor:
        """Return a block `x` `[S, H]`, each slot plus those before it, by DFlash2's kernels of `states` `[S, H]`."""
        base = self.weights(f"{name}.base_kernel")[side]  # [taps, H]
        delta = self.weights.linear(states, f"{name}.kernel_projection").view(len(x), 2, len(base), -1)[:, side]
        kernels = base + delta.repeat_interleave(x.shape[-1] // delta.shape[-1], -1)  # [S, taps, H]
        reads = [[kernels[i, t] * x[i - t] for t in range(min(len(base), i + 1))] for i in range(len(x))]
        return torch.stack([torch.stack(terms).sum(0) for terms in reads])


def _selected(
    weights: Weights, flags: BlockFlags, passage: ProbeSequence, _: Tensor, states: Tensor, logits: Tensor
) -> Tensor:
    """Return the scores of DFlash2's candidates after the tokens before them, `[k, V]`; −inf for all other tokens."""
    at, before = "candidate_selector.", passage.before
    best, candidates = logits.topk(flags.own["selector_top_k"])
    context = weights(f"{at}predecessor_codebook")[before] * weights.linear(states, f"{at}hidden_projection")
    scores = torch.einsum("kr,kcr->kc", context, weights(f"{at}successor_codebook")[candidates])
    return torch.full_like(logits, -torch.inf).scatter(1, candidates, best + scores)


def _corrected(
    weights: Weights, flags: BlockFlags, passage: ProbeSequence, _: Tensor, states: Tensor, logits: Tensor
) -> Tensor:
    """Return logits with what DSpark's Markov head adds after the tokens before, `[k, V']`."""
    if not flags.own["markov_rank"]:
        return logits
    kind = flags.own["markov_head"]
    codes = functional.embedding(passage.before, weights("markov_head.markov_w1.weight"))
    if kind == "gated":
        codes = torch.sigmoid(weights.linear(torch.cat([states, codes], -1), "markov_head.gate_proj")) * codes
    if kind == "rnn":
        memory, readings = torch.zeros_like(codes[0]), []
        for code, state in zip(codes, states, strict=True):
            joined = weights.linear(torch.cat([memory, code, state]), "markov_head.joint_proj")
            gate, fresh, out = joined.chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(fresh)
            readings.append(torch.tanh(out))
        codes = torch.stack(readings)
    return logits + weights.linear(codes, "markov_head.markov_w2")


_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_DSPARK: dict[str, tuple[str, Any]] = {
    "markov_rank": ("markov_rank", 0),
    "markov_head": ("markov_head_type", "vanilla"),
    "confidence": ("enable_confidence_head", False),
    "confidence_reads_markov": ("confidence_head_with_markov", False),
}
DFLASH = BlockKind(DFlash, "DFlashDraftModel")
DFLASH2 = BlockKind(DFlash2, "DFlash2DraftModel", {name: (name, None) for name in _SELECTOR}, _selected)
DSPARK = BlockKind(DSpark, "DSparkDraftModel", _DSPARK, _corrected, served_as="")
