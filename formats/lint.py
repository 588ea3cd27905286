"""Lint: what is wrong or unusual in a drafter's files, and what an engine would do with it. Nothing is run.

Each check takes a checkpoint and yields its findings. First come the checks of every layout, then those of EAGLE-3,
then those of block drafters (DFlash, DFlash2, DSpark).

Shapes: H hidden size, V target vocabulary, V' the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..common import BadInputError, IncompatibleError, OutriderError
from ..common.untrusted_files import read_json
from ..heads.block.dflash import default_taps
from ..targets.loading import target_path
from ..targets.model_folder import PICKLES
from ..targets.weights import WEIGHT_TYPES
from .base_layout import RECORD, DrafterFiles, ExportLayout, Fields, digest, other_types
from .blocks import BlockLayout
from .eagle_layouts import as_speculators
from .engine_logits import vllm_rope
from .import_ import NONSENSE, nonsense_explained, recognised
from .llama import EMBEDDINGS
from .raw_blocks import RawBlocks
from .speculators import Speculators, are_tokens, kept_tokens

_INV_FREQ = "inv_freq"
_UNREADABLE: tuple[type[Exception], ...] = (OutriderError, *NONSENSE)


@dataclass(frozen=True)
class LintFinding:
    """Something wrong or unusual in a checkpoint."""

    check: str  # a short name for it, for programs
    found: str  # the fault: the actual value, and the expected one
    engine: str  # what an engine would do with it
    is_fault: bool = True  # whether it is surely wrong; else it is unusual, and may be meant

    def __str__(self) -> str:
        return f"{self.check}: {self.found} {self.engine}"


@dataclass(frozen=True)
class TargetFacts:
    """A target, as its files describe it."""

    config: Fields  # its config.json; of several models in one, the text's
    folder: Path

    @classmethod
    def of(cls, path: str | Path | None) -> TargetFacts | None:
        """Return the facts of the target in this folder; None if it is not on this machine."""
        if path is None or not str(path):
            return None
        try:
            folder = Path(target_path(str(path))).expanduser()
        except BadInputError:  # a name whose model was not fetched
            return None
        if not (folder / "config.json").is_file():
            return None
        config = read_json(folder / "config.json")
        return cls(config.get("text_config") or config, folder)

    @property
    def num_layers(self) -> int | None:
        return self.config.get("num_hidden_layers")

    def embeddings(self) -> Tensor | None:
        """Return the input embeddings `[V, H]`; None without any."""
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118 (it is no mapping)
                    if name.endswith("embed_tokens.weight"):
                        return source.get_tensor(name)
        return None


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint, and the files around it."""

    files: DrafterFiles
    layout: ExportLayout  # the one that its config.json is in
    record: dict[str, Any] | None = None  # written.json of Outrider's exports; None elsewhere
    launch: dict[str, Any] = field(default_factory=dict)  # launch.json, how an engine is started with it; {} without
    served: dict[str, Any] = field(default_factory=dict)  # served.json; {} without
    target: TargetFacts | None = None  # the target's files; None if they are not at hand

    @property
    def config(self) -> dict[str, Any]:
        return self.files.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.files.tensors

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors of a type that weights have."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.dtype in WEIGHT_TYPES}

    @classmethod
    def at(cls, folder: Path, layout: ExportLayout, target: str | None) -> CheckpointView:
        """Return the view of the checkpoint in `folder`; `target` is the target's folder, None for the one it names.

        Raises BadInputError if the checkpoint cannot be read.
        """
        files = layout.load(folder)
        named = (files.config.get("speculators_config") or {}).get("verifier") or {}
        path = target or named.get("name_or_path") or files.config.get("base_model_name_or_path")
        beside: dict[str, dict[str, Any]] = {"launch": {}, "served": {}}
        for name in beside:
            with suppress(BadInputError):  # it is missing, or no object
                beside[name] = read_json(folder / f"{name}.json")
        record = read_json(folder / RECORD) if (folder / RECORD).is_file() else None
        return cls(files, layout, record, target=TargetFacts.of(path), **beside)


Findings = Iterator[LintFinding]
fault = partial(LintFinding, is_fault=True)
unusual = partial(LintFinding, is_fault=False)


def pickles(folder: Path) -> Findings:
    """Find pickles beside the weights."""
    for file in sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
        yield fault("pickle", f"{file} is a pickle.", "An engine that opens it runs whatever code it holds.")


def types(view: CheckpointView) -> Findings:
    """Find tensors of a type that no head's have, such as weights that were quantised."""
    for found in other_types(view.tensors).values():
        yield fault("dtype", found, "The engine stops, or reads quantised numbers without their scales.")


def numbers(view: CheckpointView) -> Findings:
    """Find tensors that hold no weights: NaN, infinite, or all zero where a product would vanish."""
    for name, tensor in view.weights.items():
        if not tensor.isfinite().all():
            yield fault(
                "not-finite", f"{name} has values that are not finite.", "Its drafts are NaN: none is accepted."
            )
        elif tensor.ndim == 2 and not tensor.any():
            yield fault("zeros", f"{name} is all zeros.", "What it multiplies is lost, so drafts are poor.")


def untrained_norms(view: CheckpointView) -> Findings:
    """Find norms that training never changed."""
    norms = [n for n, t in view.weights.items() if t.ndim == 1 and n.endswith("norm.weight")]
    untouched = [n for n in norms if (view.tensors[n] == 1).all()]
    if norms and len(untouched) == len(norms):
        what = f"all {len(norms)} norms are exactly 1, as before training."
        yield fault("initial", what, "The engine would draft with an untrained head.")
        return
    for name in untouched:
        yield unusual("initial", f"{name} is exactly 1, as before training.", "It may not have been loaded.")


def names_and_shapes(view: CheckpointView) -> Findings:
    """Find tensors that are missing, unknown, or of another shape than in config.json."""
    try:
        expected = view.layout.shapes(view.config)
    except IncompatibleError as error:
        what = "config.json describes layers that Outrider does not have, so names and shapes were not compared"
        yield unusual("config", f"{what}: {error}", "An engine that has them reads them.")
        return
    except _UNREADABLE as error:
        yield fault("config", f"config.json describes no head: {error}.", "The engine does not start, or guesses.")
        return
    yield from _other_names(view)
    tensors = {view.layout.plain_name(name): tensor for name, tensor in view.tensors.items()}
    for name in sorted(expected.keys() - tensors.keys()):
        yield fault("missing", f"{name} is missing.", "Engines do not notice: it stays random, and τ is near 1.")
    if not expected:
        return
    for name in sorted(tensors.keys() - expected.keys() - set(view.layout.optional)):
        if not name.endswith(_INV_FREQ):
            engine = "vLLM refuses it; SGLang drops it, and what it should have filled stays random."
            yield fault("unknown", f"{name} is no tensor of this head.", engine)
    for name in sorted(expected.keys() & tensors.keys()):
        shape, wanted = tuple(tensors[name].shape), expected[name]
        if shape != wanted:
            transposed = " (transposed)" if shape[::-1] == wanted else ""
            what = f"{name} is {shape}{transposed}, config.json says {wanted}."
            yield fault("shape", what, "The engine stops, or fills it in part.")


def _other_names(view: CheckpointView) -> Findings:
    """Find names that not every engine reads, though each has its tensor."""
    others = {name for name in view.tensors if view.layout.plain_name(name) != name}
    for start, engine in (
        ("layers.0.", "vLLM reads them, SGLang drops them without a word: export for SGLang anew."),
        ("model.", "SGLang reads them, vLLM refuses them: export for vLLM anew."),
    ):
        if count := sum(name.startswith(start) for name in others):
            yield unusual("names", f"{count} tensors are called {start}*.", engine)


def frequencies(view: CheckpointView) -> Findings:
    """Find rotary frequencies in the file, above all those that were rounded to bfloat16."""
    for name, tensor in view.tensors.items():
        if name.endswith(_INV_FREQ):
            rounded = torch.equal(tensor.float(), tensor.bfloat16().float())
            what = f"{name} holds rotary frequencies{' rounded to bfloat16' if rounded else ''}."
            engine = "Engines that load them lose the angles of distant tokens."
            yield LintFinding("rope-frequencies", what, engine, rounded)


def changed_tensors(view: CheckpointView) -> Findings:
    """Find tensors that differ from those that were exported."""
    recorded: dict[str, str] = (view.record or {}).get("tensors", {})
    by_digest = {value: name for name, value in recorded.items()}
    for name in sorted(view.tensors.keys() & recorded.keys()):
        tensor = view.tensors[name]
        now, was = digest(tensor), recorded[name]
        if now == was:
            continue
        if (other := by_digest.get(now)) is not None:
            yield fault("swapped", f"{name} holds what was exported as {other}.", "It is used in that one's place.")
        elif tensor.ndim == 2 and digest(tensor.T) == was:
            yield fault("transposed", f"{name} is the transpose of what was exported.", "Its products are wrong.")
        else:
            yield fault("changed", f"{name} differs from what was exported.", "Drafts differ from what was measured.")


def changed_config(view: CheckpointView) -> Findings:
    """Find fields of config.json that differ from those that were exported."""
    recorded: dict[str, Any] | None = (view.record or {}).get("config")
    if recorded is None:
        return
    now, was = _flat(view.config), _flat(recorded)
    for name in sorted(now.keys() | was.keys()):
        one, other = now.get(name, "absent"), was.get(name, "absent")
        if one != other:
            what = f"config.json: {name} is {one!r}, exported was {other!r}."
            yield fault("config-changed", what, "The engine computes something else than what was measured.")


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) and value else {f"{before}{name}": value}
    return flat


def depths(view: CheckpointView) -> Findings:
    """Find depths that do not agree: of the config, of the launch, and of the measurement."""
    settings = view.launch.get("settings") or {}
    tokens = settings.get("speculative-num-draft-tokens")
    stated = {
        "served.json: depth": view.served.get("depth"),
        "launch.json: num_speculative_tokens": settings.get("num_speculative_tokens"),
        "launch.json: speculative-num-steps": settings.get("speculative-num-steps"),
        "launch.json: speculative-num-draft-tokens − 1": None if tokens is None else tokens - 1,
        "config.json: speculative_tokens": _speculative_tokens(view.config),
    }
    known = {name: value for name, value in stated.items() if value is not None}
    if len(set(known.values())) > 1:
        what = f"depths differ: {', '.join(f'{name} {value}' for name, value in known.items())}."
        yield fault("depth", what, "The engine drafts deeper or less deep than what was measured.")


def _speculative_tokens(config: Fields) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def rotary_positions(view: CheckpointView) -> Findings:
    """Find rotary positions that two fields describe differently, that vLLM does not read, or not the target's."""
    layer = view.config.get("transformer_layer_config") or view.config
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_theta")
    base = new.get("rope_theta", old)
    wrong = "Old and new engines turn positions by different angles."
    if new and old is not None and new.get("rope_theta") not in (None, old):
        yield fault("rope", f"rope_parameters say a base of {new['rope_theta']}, rope_theta says {old}.", wrong)
    scaling = (layer.get("rope_scaling") or {}).get("rope_type", "default")
    if new and "rope_theta" in layer and new.get("rope_type", "default") != scaling:
        yield fault("rope", f"rope_parameters are {new.get('rope_type')!r}, rope_scaling is {scaling!r}.", wrong)
    if not view.layout.is_model and layer.get("num_attention_heads"):
        yield from _read_by_vllm(view, layer)
    config = {} if view.target is None or view.layout.is_model else view.target.config
    rope = config.get("rope_parameters") or {}
    theirs = (rope.get("full_attention") or rope).get("rope_theta", config.get("rope_theta"))
    if None not in (base, theirs) and theirs != base:
        what = f"the rotary base is {base:g}, the target's {theirs:g}."
        yield unusual("rope-base", what, "If the head was trained with the target's, later drafts are wrong.")


def _read_by_vllm(view: CheckpointView, layer: dict[str, Any]) -> Findings:
    """Find rotary positions of a head's layers at which vLLM stops, or that it turns otherwise than heads learn."""
    size = int(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"])
    try:
        turned = 2 * len(vllm_rope(layer, size)[0])
    except (BadInputError, KeyError) as error:
        yield fault("rope", str(error), "vLLM does not start, or turns positions by another base.")
        return
    except IncompatibleError as error:
        yield unusual("rope", str(error), "The head drafts otherwise wherever that differs from its training.")
        return
    if turned != size:  # known of our own: they turn all
        what = f"{turned} of each head's {size} dimensions turn (partial_rotary_factor), in training usually all."
        engine = "Inherited from the target by accident, it breaks all positions."
        yield LintFinding("rope", what, engine, is_fault=view.record is not None)
    if rope := [name for name in (layer.get("rope_parameters") or {}) if name.startswith("mrope")]:
        yield unusual("rope", f"rope_parameters have {', '.join(rope)}.", "Positions in images turn by sections.")
    if _is_block(view) and not {**layer, **(layer.get("rope_parameters") or {})}.get("rope_theta"):
        yield fault("rope", "rope_theta is missing.", "vLLM takes 1,000,000 for such a drafter, others 10,000.")


def context(view: CheckpointView) -> Findings:
    """Find a drafter that ends before its target does."""
    layer = view.config.get("transformer_layer_config") or view.config
    own = layer.get("max_position_embeddings")
    theirs = None if view.target is None else view.target.config.get("max_position_embeddings")
    if own is not None and theirs is not None and own < theirs:
        what = f"max_position_embeddings is {own}, the target's {theirs}."
        yield unusual("context", what, "Beyond that an engine's drafts are wrong (vLLM: token 0), and nothing says so.")


def embeddings(view: CheckpointView) -> Findings:
    """Find copies of embeddings that are not the target's."""
    own = view.weights.get(EMBEDDINGS)
    theirs = None if view.target is None or own is None else view.target.embeddings()
    if own is None or theirs is None:
        return
    engine = "The engine reads these in place of the target's: the head was not trained on them."
    rounding = 2 * max(torch.finfo(own.dtype).eps, torch.finfo(theirs.dtype).eps)
    if own.shape != theirs.shape:
        what = f"{EMBEDDINGS} is {tuple(own.shape)}, the target's {tuple(theirs.shape)}."
        yield fault("embeddings", what, engine)
    elif not torch.allclose(own.float(), theirs.float(), rtol=rounding, atol=1e-6):
        yield fault("embeddings", f"{EMBEDDINGS} differs from the target's embeddings.", engine)


def _is_block(view: CheckpointView) -> bool:
    return isinstance(view.layout, BlockLayout)


def _is_speculators(view: CheckpointView) -> bool:
    return isinstance(view.layout, Speculators)


def _is_raw(view: CheckpointView) -> bool:
    return isinstance(view.layout, RawBlocks)


def _part(view: CheckpointView, name: str) -> dict[str, Any]:
    """Return a part of config.json; {} without: `eagle_config`, or `dflash_config` of z-lab's layout."""
    return view.config.get(name) or {}


def taps(view: CheckpointView) -> Findings:
    """Find taps that are missing, out of order or out of range, or counted as another layout counts them."""
    name, listed = view.layout.listed_taps(view.config)
    if not listed:
        # EAGLE's own repository never writes them: its heads read the taps that are engines' default.
        is_fault = not view.layout.counts_outputs or _is_block(view)
        engine = "The engine stops, or silently taps layers of its own choice: right for drafters that read those."
        yield LintFinding("taps-missing", f"config.json has no {name}.", engine, is_fault)
        return
    if list(listed) != sorted(set(listed)):
        engine = "Engines sort them and take each once, so fc reads them in another order, or too few."
        yield fault("taps-order", f"{name} is {listed}.", engine)
    layers = (view.target and view.target.num_layers) or view.config.get("num_target_layers")
    if layers:
        yield from _counted_taps(view, name, [int(tap) for tap in listed], int(layers))


def _counted_taps(view: CheckpointView, name: str, taps: list[int], layers: int) -> Findings:
    shift = int(view.layout.counts_outputs)
    if min(taps) < view.layout.first_tap or max(taps) > layers - shift:
        what = f"{name} is {taps}, the target has {layers} layers."
        yield fault("taps-range", what, "The engine fails, or taps nothing there.")
    if max(taps) == layers - shift:
        what = f"{name} is {taps}: the last layer's output ({layers} layers)."
        yield unusual("taps-last", what, "Engines give it before the target's final norm, libraries after it.")
    default = default_taps(layers, len(taps)) if _is_block(view) else (2, layers // 2, layers - 3)
    usual = [tap - shift for tap in default]
    if len(taps) > 1 and taps in ([tap + 1 for tap in usual], [tap - 1 for tap in usual]):
        counted = "outputs of layers" if shift else "hidden states, 0 for the embeddings"
        what = f"{name} is {taps}: the usual {usual}, off by one (this layout counts {counted})."
        yield fault("taps-off-by-one", what, "The drafter reads neighbouring layers: drafts are much worse, silently.")


def _in_speculators(view: CheckpointView) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and tensors of an EAGLE-3 head as the `speculators` layout has them."""
    if _is_speculators(view):
        return view.config, view.tensors
    same = as_speculators(view.files, (view.target and view.target.num_layers) or 12)
    return same.config, same.tensors


def norm_flags(view: CheckpointView) -> Findings:
    """Find flags that are missing, or that the tensors contradict."""
    config, tensors = _in_speculators(view)
    if _is_speculators(view) and "norm_before_residual" not in view.config:
        engine = "vLLM takes true for this layout and false for others."
        yield fault("norm-flag-missing", "config.json has no norm_before_residual.", engine)
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        if what := _contradiction(config, flag, tensors, prefix):
            ignores, unset = "The engine ignores the norm, or refuses the tensor.", "Its norm stays as it was made."
            yield fault("norm-flag", what, unset if config.get(flag) else ignores)
    engine = "If it was trained with {}, all drafts but the first are worse."
    if config.get("fc_norm") and not config.get("norm_output"):
        what = "fc_norm without norm_output: EAGLE-3.1 sets both, or neither."
        yield unusual("norm-flag", what, engine.format("both"))
    if config.get("norm_output") and not (config.get("fc_norm") or config.get("norm_before_fc")):
        what = "norm_output without a norm on the taps: EAGLE-3.1 sets both, or neither."
        yield unusual("norm-flag", what, engine.format("neither"))


def _contradiction(config: Fields, flag: str, tensors: dict[str, Tensor], prefix: str) -> str | None:
    """Return the sentence that a flag and the tensors that it announces do not agree; None if they do."""
    is_there = any(name.startswith(prefix) for name in tensors)
    if is_there == bool(config.get(flag)):
        return None
    return f"{flag} is {config.get(flag, 'absent')}, but the file has {'a' if is_there else 'no'} tensor {prefix}*."


def tied_embeddings(view: CheckpointView) -> Findings:
    """Find a config that makes engines take the embeddings in place of the head's own output embedding."""
    layer = _part(view, "transformer_layer_config")
    if view.config.get("tie_word_embeddings") or layer.get("tie_word_embeddings"):
        what = "tie_word_embeddings is true, but the head has an output embedding of its own."
        yield fault("tied", what, "SGLang drafts with the target's embeddings in its place.")


def draft_vocabulary(view: CheckpointView) -> Findings:
    """Find a draft vocabulary that is missing, of ids instead of offsets, or not the one of t2d."""
    config, tensors = _in_speculators(view)
    vocab = int((config.get("transformer_layer_config") or {}).get("vocab_size") or 0)
    kept = int(config.get("draft_vocab_size") or vocab)
    if view.target is not None and (theirs := view.target.config.get("vocab_size")) not in (None, vocab):
        yield fault("vocabulary", f"vocab_size is {vocab}, the target's {theirs}.", "Engines refuse it, or fail.")
    if "d2t" in tensors:
        yield from _offsets(tensors["d2t"], tensors.get("t2d"), vocab, kept)
    elif kept < vocab:
        what = f"d2t is missing, but the draft vocabulary has {kept} of {vocab} tokens."
        yield fault("d2t-missing", what, "Drafts are taken for the first tokens of the vocabulary.")


def _offsets(d2t: Tensor, t2d: Tensor | None, vocab: int, kept: int) -> Findings:
    if d2t.shape != (kept,) or d2t.is_floating_point():
        what = f"d2t is {tuple(d2t.shape)} of {d2t.dtype}, expected {kept} whole numbers."
        yield fault("d2t", what, "The engine stops, or drafts other tokens.")
        return
    ids = torch.arange(kept) + d2t.long()
    engine = "The engine adds each one's own place: it drafts other tokens, and nearly none is accepted."
    if _are_ids(d2t.long(), t2d, vocab):
        yield fault("d2t-ids", "d2t holds token ids; engines expect offsets (target id − draft id).", engine)
    elif not are_tokens(ids, vocab):
        yield fault("d2t", f"d2t does not name {kept} different tokens of the {vocab}.", engine)
    elif t2d is not None and not torch.equal(t2d.bool(), kept_tokens(ids, len(t2d))):
        yield fault("d2t", "d2t and t2d name different tokens.", engine)
    elif bool((ids.diff() < 0).any()):
        what = "d2t's tokens do not ascend, as trainers write them: its rows may be shifted."
        yield unusual("d2t", what, "If they are, nearly no draft is accepted; if they are meant, all is right.")


def _are_ids(ids: Tensor, t2d: Tensor | None, vocab: int) -> bool:
    """Return whether d2t holds ids: those of t2d, or without one such as ascend.

    Offsets of a sorted vocabulary stay the same from one token to its neighbour; ids never do.
    """
    if len(ids) < 2 or not are_tokens(ids, vocab):
        return False
    return bool((ids.diff() > 0).all()) if t2d is None else torch.equal(t2d.bool(), kept_tokens(ids, len(t2d)))


def target_layers(view: CheckpointView) -> Findings:
    """Find a drafter that was made for a target of another depth."""
    said = view.config.get("num_target_layers")
    layers = view.target and view.target.num_layers
    if said and layers and said != layers:
        what = f"num_target_layers is {said}, the target has {layers}."
        yield fault("target-layers", what, "Its taps mean other layers there.")


def mask_token(view: CheckpointView) -> Findings:
    """Find a mask token that is missing, outside the vocabulary, or one that texts have."""
    mask = view.config.get("mask_token_id", _part(view, "dflash_config").get("mask_token_id"))
    if mask is None:
        engine = "The engine stops, or embeds token 0 in every open slot."
        yield fault("mask-missing", "config.json has no mask_token_id.", engine)
        return
    config = view.target.config if view.target is not None else {}
    vocab = config.get("vocab_size")
    if not 0 <= int(mask) < (vocab or mask + 1):
        yield fault("mask", f"mask_token_id is {mask}, the target has {vocab} tokens.", "The engine fails.")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        theirs = config.get(name)
        if mask in (theirs if isinstance(theirs, list) else [theirs]):
            engine = "Texts hold this token: open slots read as the end, or the start, of one."
            yield fault("mask", f"mask_token_id {mask} is the target's {name}.", engine)


def block_slots(view: CheckpointView) -> Findings:
    """Find blocks whose size, layout or attention engines guess, each in its own way."""
    yield from (_raw_slots(view) if _is_raw(view) else _speculators_slots(view))
    layer = view.layout.layer(view.config) if isinstance(view.layout, BlockLayout) else {}
    if len(kinds := set(layer.get("layer_types") or [])) > 1:
        engine = "vLLM and SGLang read some layers' blocks causally and others' whole."
        yield unusual("mixed-layers", f"layer_types are {', '.join(sorted(kinds))}.", engine)


def _raw_slots(view: CheckpointView) -> Findings:
    config, own = view.config, _part(view, "dflash_config")
    inside, outside = own.get("block_size"), config.get("block_size")
    if inside is None and outside is None:
        yield fault("block-size-missing", "config.json has no block_size.", "Engines take 16, or stop.")
    if None not in (inside, outside) and inside != outside:
        engine = "Engines read one or the other, and a block of another length gives other drafts."
        yield fault("block-size", f"block_size is {outside}, and {inside} in dflash_config.", engine)
    if view.layout.drafter != "dspark" and "causal" not in own and "is_causal" not in own:
        engine = "Engines take it from layer_types: causal where these are sliding_attention, else not."
        yield unusual("causal-missing", "dflash_config has no causal.", engine)
    if len({bool(c) for c in (own.get("causal"), config.get("is_causal")) if c is not None}) > 1:
        engine = "vLLM goes by the first, SGLang by the second."
        yield fault("causal", "dflash_config.causal and is_causal contradict each other.", engine)
    elif own.get("causal") and "is_causal" not in config:
        engine = "SGLang reads no other: it reads each block whole."
        yield unusual("causal-missing", "config.json has no is_causal beside dflash_config.causal.", engine)
    if own.get("shift_label"):
        engine = "Engines read DFlash's first slot as the root alone: every draft is one late."
        yield fault("layout", "dflash_config.shift_label is true: its first slot drafts, too.", engine)
    if own.get("use_swa") or "sliding_attention" in (config.get("layer_types") or []):
        engine = "Engines count it from the slot or from the anchor, and read such layers causally."
        yield fault("window", "its layers have a sliding window, which this layout does not define.", engine)


def _speculators_slots(view: CheckpointView) -> Findings:
    config, kind = view.config, view.layout.drafter
    if "sample_from_anchor" not in config:
        engine = "Missing, it is false for DFlash and true for DSpark, and false for both in llama.cpp."
        yield fault("layout-missing", "config.json has no sample_from_anchor.", engine)
    elif kind != "dspark" and config["sample_from_anchor"]:
        engine = "speculators warns that engines may not serve it: every draft is one late."
        yield fault("layout", "sample_from_anchor is true: DFlash's first slot would draft, too.", engine)
    layer = _part(view, "transformer_layer_config")
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    if sliding and "sliding_window_non_causal" not in config:
        what = "its layers have a window, and config.json no sliding_window_non_causal."
        yield unusual("causal-missing", what, "vLLM then reads each block whole, speculators DFlash's causally.")
    if not sliding and kind != "dspark" and config.get("sliding_window_non_causal") is False:
        what = "sliding_window_non_causal is false, and its layers have no window."
        yield fault("causal", what, "speculators reads each block whole, vLLM causally.")
    if sliding and not layer.get("sliding_window"):
        yield fault("window", "layer_types name a window, and sliding_window none.", "The engine stops, or guesses.")
    asked, size = _speculative_tokens(config), config.get("block_size")
    if asked is None or size is None:
        return
    most = int(size) - (not config.get("sample_from_anchor", kind == "dspark"))
    if int(asked) != most:
        what = f"speculative_tokens is {asked}, and a block of {size} drafts {most}."
        engine = "Engines read as many slots as they draft: another block than it was trained on gives other drafts."
        yield LintFinding("block-depth", what, engine, int(asked) > most)


def block_architecture(view: CheckpointView) -> Findings:
    """Find architectures under which an engine would take the drafter for another one."""
    assert isinstance(view.layout, BlockLayout)
    names, own = list(view.config.get("architectures") or []), view.layout.kind.architecture
    projector = _part(view, "dflash_config").get("projector_type", view.config.get("projector_type"))
    if projector not in (None, view.layout.drafter):
        engine = "SGLang drops such heads without a word and reads the first slot as the root; TensorRT-LLM reads them."
        yield fault("projector", f"projector_type is {projector!r} under {', '.join(names)}.", engine)
    if _is_raw(view) and "DSparkDraftModel" in names:
        what = "architectures name DSparkDraftModel without speculators_model_type."
        yield fault("architecture", what, "vLLM takes it for DeepSeek-V4's class; write Qwen3DSparkModel.")
    if not _is_raw(view) and names and own not in names:
        what = f"architectures are {names} for a {view.layout.drafter} drafter; published files name {own}."
        yield unusual("architecture", what, "Engines that go by the class do not know it.")


def flat_names(view: CheckpointView) -> Findings:
    """Find names of DSpark's heads that engines do not read."""
    flat = sorted(name for name in view.tensors if name.startswith(("markov_w1.", "markov_w2.", "confidence_proj.")))
    if flat:
        names = f"{flat[0]} has a flat name; engines read markov_head.* and confidence_head.*."
        yield fault("head-names", names, "SGLang drops it for DFlash and stops for DSpark.")


def dspark_heads(view: CheckpointView) -> Findings:
    """Find DSpark's heads on which config.json and the tensors disagree, or that some engine lacks."""
    for flag, prefix in (("enable_confidence_head", "confidence_head."), ("markov_rank", "markov_head.")):
        if what := _contradiction(view.config, flag, view.tensors, prefix):
            yield fault("head-flag", what, "SGLang stops where a head that is named is missing, and drops another.")
    if (kind := view.config.get("markov_head_type", "vanilla")) != "vanilla":
        engine = "vLLM serves the vanilla head only; SGLang all three."
        yield unusual("markov-kind", f"markov_head_type is {kind!r}.", engine)


Check = Callable[[CheckpointView], Findings]
EVERY: tuple[Check, ...] = (types, numbers, untrained_norms, names_and_shapes, frequencies)
EVERY += (changed_tensors, changed_config, depths, rotary_positions, context, embeddings)
_EAGLE3: tuple[Check, ...] = (taps, norm_flags, draft_vocabulary, tied_embeddings)
_BLOCKS: tuple[Check, ...] = (taps, target_layers, mask_token, block_slots, block_architecture, flat_names)
# By the type of our drafter, the checks beside those of every one.
CHECKS = {
    "eagle3": _EAGLE3,
    "peagle": (*_EAGLE3, mask_token),
    "dspark": (*_BLOCKS, dspark_heads),
}


def _checks_of(layout: ExportLayout) -> tuple[Check, ...]:
    """Return the checks of drafters in this layout."""
    return EVERY + CHECKS.get(layout.drafter, _BLOCKS if isinstance(layout, BlockLayout) else ())


# What may be meant by who trained a head: it lies in the values of weights, or is only unusual.
_MEANT = ("not-finite", "zeros", "initial", "taps-off-by-one", "d2t-ids")


def faults_of_writing(files: DrafterFiles, layout: ExportLayout) -> list[LintFinding]:
    """Return the faults in files that a layout of ours wrote, whatever drafter it was given."""
    view = CheckpointView(files, layout, record={})
    findings = [finding for check in _checks_of(layout) for finding in check(view)]
    return [finding for finding in findings if finding.is_fault and finding.check not in _MEANT]


def lint(folder: str | Path, target: str | None = None) -> list[LintFinding]:
    """Return the findings in the drafter's files in `folder`, faults first; [] for none.

    `target`: the target's folder; None takes the one that the files name, if it is on this machine.

    Raises BadInputError if there is no checkpoint in a known layout, or its files cannot be read.
    """
    folder = Path(folder).expanduser()
    if not any(folder.glob("*.safetensors")) and (pickled := list(pickles(folder))):
        return pickled
    layout = recognised(folder)
    with nonsense_explained(folder):
        view = CheckpointView.at(folder, layout, target)
        findings = [*pickles(folder), *(finding for check in _checks_of(layout) for finding in check(view))]
    return sorted(findings, key=lambda finding: not finding.is_fault)
