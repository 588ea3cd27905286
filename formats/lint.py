"""Lint: what is wrong, or unusual, in a drafter's files, and what an engine would do with it. Nothing is run.

Each check takes a checkpoint and yields its findings; one that does not concern a layout yields none. First the checks
of any layout, then those of EAGLE-3, then those of block drafters (DFlash, DSpark).

Shapes: H hidden size, V target vocabulary, V' the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import IncompatibleError, OutriderError
from ..heads.block.dflash import default_taps
from ..targets.model_folder import PICKLES
from .blocks import TAPS as BLOCK_TAPS
from .blocks import BlockLayout
from .checkpoint_view import CheckpointView, LintFinding, digest
from .eagle import as_speculators
from .import_ import NONSENSE, nonsense_explained, recognised
from .llama import EMBEDDINGS
from .raw_blocks import TAPS as RAW_TAPS
from .raw_blocks import RawBlocks
from .speculators import Speculators

_INV_FREQ = "inv_freq"
_UNREADABLE: tuple[type[Exception], ...] = (OutriderError, *NONSENSE)


def pickles(folder: Path) -> Iterator[LintFinding]:
    """Find pickles beside the weights."""
    for file in sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
        yield LintFinding("pickle", f"{file} is a pickle.", "An engine that opens it runs whatever code it holds.")


def numbers(look: CheckpointView) -> Iterator[LintFinding]:
    """Find tensors that hold no weights: NaN, infinite, or all zero where a product would vanish."""
    for name, tensor in look.tensors.items():
        if not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            found = f"{name} holds numbers that are not finite."
            yield LintFinding("not-finite", found, "Its drafts are NaN: none is accepted.")
        elif tensor.ndim == 2 and not tensor.any():
            yield LintFinding("zeros", f"{name} is all zeros.", "What it multiplies is lost, so drafts are poor.")


def untrained_norms(look: CheckpointView) -> Iterator[LintFinding]:
    """Find weights that training never moved."""
    norms = [n for n, t in look.tensors.items() if t.ndim == 1 and t.is_floating_point() and n.endswith("norm.weight")]
    untouched = [n for n in norms if (look.tensors[n] == 1).all()]
    if norms and len(untouched) == len(norms):
        found = f"all {len(norms)} norms are exactly 1, as before training."
        yield LintFinding("initial", found, "The engine would draft with an untrained head.")
    for name in untouched if len(untouched) < len(norms) else []:
        yield LintFinding("initial", f"{name} is exactly 1, as before training.", "It may not have been loaded.", False)


def names_and_shapes(look: CheckpointView) -> Iterator[LintFinding]:
    """Find tensors that are missing, unknown, or of another shape than config.json says."""
    try:
        expected = look.layout.shapes(look.config)
    except IncompatibleError as error:
        found = (
            f"config.json describes layers that Outrider does not have, so names and shapes were not compared: {error}"
        )
        yield LintFinding("config", found, "An engine that has them reads them.", False)
        return
    except _UNREADABLE as error:
        yield LintFinding(
            "config", f"config.json describes no head: {error}.", "The engine does not start, or guesses."
        )
        return
    yield from _spelled(look)
    tensors = {look.layout.plain_name(name): tensor for name, tensor in look.tensors.items()}
    for name in sorted(expected.keys() - tensors.keys()):
        yield LintFinding("missing", f"{name} is missing.", "Engines do not miss it: it stays random, and τ is near 1.")
    if not expected:
        return
    for name in sorted(tensors.keys() - expected.keys() - set(look.layout.optional)):
        if not name.endswith(_INV_FREQ):
            engine = "vLLM refuses it; SGLang drops it, and what it should have filled stays random."
            yield LintFinding("unknown", f"{name} is no tensor of this head.", engine)
    for name in sorted(expected.keys() & tensors.keys()):
        yield from _shaped(name, tuple(tensors[name].shape), expected[name])


def _spelled(look: CheckpointView) -> Iterator[LintFinding]:
    """Find names that not every engine reads, though each has its tensor."""
    others = {name for name in look.tensors if look.layout.plain_name(name) != name}
    engines = {
        "layers.0.": "vLLM reads them, SGLang drops them without a word: export for SGLang anew.",
        "model.": "SGLang reads them, vLLM refuses them: export for vLLM anew.",
    }
    for start, engine in engines.items():
        if count := sum(name.startswith(start) for name in others):
            yield LintFinding("names", f"{count} tensors are called {start}*.", engine, False)


def _shaped(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> Iterator[LintFinding]:
    if shape != expected:
        transposed = " (transposed)" if shape[::-1] == expected else ""
        what = f"{name} is {shape}{transposed}, config.json says {expected}."
        yield LintFinding("shape", what, "The engine stops, or fills it in part.")


def frequencies(look: CheckpointView) -> Iterator[LintFinding]:
    """Find rotary frequencies in the file, above all those that were rounded to bfloat16."""
    for name, tensor in look.tensors.items():
        if not name.endswith(_INV_FREQ):
            continue
        rounded = torch.equal(tensor.float(), tensor.bfloat16().float())
        how = " rounded to bfloat16" if rounded else ""
        found = f"{name} holds rotary frequencies{how}."
        yield LintFinding(
            "rope-frequencies", found, "Engines that load them lose the angles of distant tokens.", rounded
        )


# ------------------------------------------------------------ changes since the export


def changed_tensors(look: CheckpointView) -> Iterator[LintFinding]:
    """Find tensors that are not what was exported."""
    recorded: dict[str, str] = (look.record or {}).get("tensors", {})
    by_digest = {value: name for name, value in recorded.items()}
    for name in sorted(look.tensors.keys() & recorded.keys()):
        tensor = look.tensors[name]
        now = digest(tensor)
        if now != recorded[name]:
            yield _changed(name, tensor, by_digest.get(now), recorded[name])


def _changed(name: str, tensor: Tensor, other: str | None, was: str) -> LintFinding:
    if other is not None:
        return LintFinding("swapped", f"{name} holds what was exported as {other}.", "It is used in that one's place.")
    if tensor.ndim == 2 and digest(tensor.T) == was:
        return LintFinding("transposed", f"{name} is the transpose of what was exported.", "Its products are wrong.")
    return LintFinding("changed", f"{name} differs from what was exported.", "Drafts differ from what was measured.")


def changed_config(look: CheckpointView) -> Iterator[LintFinding]:
    """Find fields of config.json that are not what was exported."""
    recorded: dict[str, Any] | None = (look.record or {}).get("config")
    if recorded is None:
        return
    now, was = _flat(look.config), _flat(recorded)
    for name in sorted(now.keys() | was.keys()):
        if now.get(name, _ABSENT) != was.get(name, _ABSENT):
            found = f"config.json: {name} is {now.get(name, _ABSENT)!r}, exported was {was.get(name, _ABSENT)!r}."
            yield LintFinding("config-changed", found, "The engine computes something else than what was measured.")


_ABSENT = "absent"


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) and value else {f"{before}{name}": value}
    return found


# ------------------------------------------------------------ depth, rotary positions, embeddings


def depths(look: CheckpointView) -> Iterator[LintFinding]:
    """Find depths that do not agree: of the config, of the launch, and of what was measured."""
    settings = look.launch.get("settings") or {}
    said = {
        "served.json: depth": look.served.get("depth"),
        "launch.json: num_speculative_tokens": settings.get("num_speculative_tokens"),
        "launch.json: speculative-num-steps": settings.get("speculative-num-steps"),
        "launch.json: speculative-num-draft-tokens − 1": _less_one(settings.get("speculative-num-draft-tokens")),
        "config.json: speculative_tokens": _proposed(look.config),
    }
    known = {name: value for name, value in said.items() if value is not None}
    if len(set(known.values())) > 1:
        found = f"depths differ: {', '.join(f'{name} {value}' for name, value in known.items())}."
        yield LintFinding("depth", found, "The engine drafts deeper or less deep than what was measured.")


def _less_one(value: int | None) -> int | None:
    return None if value is None else value - 1


def _proposed(config: dict[str, Any]) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found: int | None = methods[0].get("speculative_tokens")
    return found


def rotary_positions(look: CheckpointView) -> Iterator[LintFinding]:
    """Find rotary positions that are said in two ways, or not as the target's."""
    layer = look.config.get("transformer_layer_config") or look.config
    new, old = layer.get("rope_parameters") or {}, layer.get("rope_theta")
    wrong = "Old and new engines turn positions by different angles."
    if new and old is not None and new.get("rope_theta") not in (None, old):
        yield LintFinding("rope", f"rope_parameters say a base of {new['rope_theta']}, rope_theta says {old}.", wrong)
    scaling = (layer.get("rope_scaling") or {}).get("rope_type", "default")
    if new and "rope_theta" in layer and new.get("rope_type", "default") != scaling:
        yield LintFinding("rope", f"rope_parameters are {new.get('rope_type')!r}, rope_scaling is {scaling!r}.", wrong)
    for name in ("mrope_section", "partial_rotary_factor"):
        value = layer.get(name, new.get(name))
        if value not in (None, 1, 1.0):
            what = f"{name} is {value}: the head's layers turn all of each head's dimensions."
            yield LintFinding("rope", what, "Inherited from the target by accident, it breaks all positions.", False)
    yield from _other_base(look, new.get("rope_theta", old))


def _other_base(look: CheckpointView, base: float | None) -> Iterator[LintFinding]:
    if look.target is None or base is None:
        return
    config = look.target.config
    theirs = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if theirs is not None and theirs != base:
        found = f"the rotary base is {base:g}, the target's {theirs:g}."
        yield LintFinding(
            "rope-base", found, "If the head was trained with the target's, later drafts are wrong.", False
        )


def embeddings(look: CheckpointView) -> Iterator[LintFinding]:
    """Find copies of embeddings that are not the target's."""
    own = look.tensors.get(EMBEDDINGS)
    theirs = None if look.target is None or own is None else look.target.embeddings()
    if own is None or theirs is None:
        return
    engine = "The engine reads these in place of the target's: the head was not trained on them."
    if own.shape != theirs.shape:
        found = f"{EMBEDDINGS} is {tuple(own.shape)}, the target's {tuple(theirs.shape)}."
        yield LintFinding("embeddings", found, engine)
        return
    rounding = 2 * max(torch.finfo(own.dtype).eps, torch.finfo(theirs.dtype).eps)
    if not torch.allclose(own.float(), theirs.float(), rtol=rounding, atol=1e-6):
        yield LintFinding("embeddings", f"{EMBEDDINGS} differs from the target's embeddings.", engine)


_TAPS = "eagle_aux_hidden_state_layer_ids"


def _is_eagle3(look: CheckpointView) -> bool:
    return look.layout.drafter in ("eagle3", "peagle")


def _is_speculators(look: CheckpointView) -> bool:
    return isinstance(look.layout, Speculators)


def _plain_names(look: CheckpointView) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors in the words of the `speculators` layout."""
    if _is_speculators(look):
        return look.config, look.tensors
    same = as_speculators(look.found, (look.target and look.target.num_layers) or 12)
    return same.config, same.tensors


def _own_taps(look: CheckpointView) -> list[int] | None:
    """Return the taps as they are written, in the layout's own numbering; None if they are missing."""
    if _is_speculators(look):
        return look.config.get(_TAPS)
    return (look.config.get("eagle_config") or {}).get(_TAPS)


# ------------------------------------------------------------ EAGLE-3: taps


def eagle_taps(look: CheckpointView) -> Iterator[LintFinding]:
    """Find taps that are missing, out of order or out of range, or in another program's numbering."""
    if not _is_eagle3(look):
        return
    found = _own_taps(look)
    if not found:
        # The method's own repository never writes them: its heads read what engines tap by default.
        is_flat = look.layout.name != "speculators"
        engine = "The engine silently taps its own default layers: right for heads that were trained on those."
        yield LintFinding("taps-missing", f"config.json has no {_TAPS}.", engine, not is_flat)
        return
    if list(found) != sorted(set(found)):
        engine = "vLLM sorts them and takes each once, so fc reads them in another order, or too few."
        yield LintFinding("taps-order", f"{_TAPS} is {found}.", engine)
    yield from _counted_eagle_taps(look, list(found))


def _counted_eagle_taps(look: CheckpointView, found: list[int]) -> Iterator[LintFinding]:
    layers = look.target and look.target.num_layers
    if not layers:
        return
    here = _is_speculators(look)
    if min(found) < 0 or max(found) > layers - (0 if here else 1):
        engine = "The engine fails, or taps nothing there."
        yield LintFinding("taps-range", f"{_TAPS} is {found}, the target has {layers} layers.", engine)
    # The same three tensors, as two programs count them; every other distance from them is nobody's custom.
    usual = [2, layers // 2, layers - 3] if here else [1, layers // 2 - 1, layers - 4]
    for shift in (-1, 1):
        if found == [tap + shift for tap in usual]:
            which = "outputs of layers, as SGLang counts" if shift < 0 else "one more than hidden states are counted"
            what = f"{_TAPS} is {found}: the usual {usual}, off by one ({which if here else 'another numbering'})."
            yield LintFinding(
                "taps-off-by-one", what, "The head reads neighbouring layers: first drafts are much worse."
            )


# ------------------------------------------------------------ EAGLE-3: norm flags


def norm_flags(look: CheckpointView) -> Iterator[LintFinding]:
    """Find flags that are missing, or that the tensors contradict."""
    if not _is_eagle3(look):
        return
    config, tensors = _plain_names(look)
    if _is_speculators(look) and "norm_before_residual" not in look.config:
        engine = "vLLM takes true for this layout and false for others."
        yield LintFinding("norm-flag-missing", "config.json has no norm_before_residual.", engine)
    for flag, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        there = any(name.startswith(prefix) for name in tensors)
        if there != bool(config.get(flag)):
            what = (
                f"{flag} is {config.get(flag, 'absent')}, but the file has {'a' if there else 'no'} tensor {prefix}*."
            )
            engine = (
                "The engine ignores the norm, or refuses the tensor." if there else "Its norm stays as it was made."
            )
            yield LintFinding("norm-flag", what, engine)
    if config.get("fc_norm") and not config.get("norm_output"):
        what = "fc_norm without norm_output: EAGLE-3.1 sets both, or neither."
        yield LintFinding("norm-flag", what, "If it was trained with both, all drafts but the first are worse.", False)
    if config.get("norm_output") and not (config.get("fc_norm") or config.get("norm_before_fc")):
        what = "norm_output without a norm on the taps: EAGLE-3.1 sets both, or neither."
        yield LintFinding(
            "norm-flag", what, "If it was trained with neither, all drafts but the first are worse.", False
        )


def tied_embeddings(look: CheckpointView) -> Iterator[LintFinding]:
    """Find a config that makes engines take the embeddings in place of the head's own output embedding."""
    layer = look.config.get("transformer_layer_config") or {}
    if _is_eagle3(look) and (look.config.get("tie_word_embeddings") or layer.get("tie_word_embeddings")):
        what = "tie_word_embeddings is true, but the head has an output embedding of its own."
        yield LintFinding("tied", what, "SGLang drafts with the target's embeddings in its place.")


# ------------------------------------------------------------ EAGLE-3: draft vocabulary


def draft_vocabulary(look: CheckpointView) -> Iterator[LintFinding]:
    """Find a draft vocabulary that is missing, of ids instead of offsets, or not the one of t2d."""
    if not _is_eagle3(look):
        return
    config, tensors = _plain_names(look)
    vocab = int((config.get("transformer_layer_config") or {}).get("vocab_size") or 0)
    kept = int(config.get("draft_vocab_size") or vocab)
    if look.target is not None and (theirs := look.target.config.get("vocab_size")) not in (None, vocab):
        yield LintFinding("vocabulary", f"vocab_size is {vocab}, the target's {theirs}.", "Engines refuse it, or fail.")
    if "d2t" not in tensors:
        if kept < vocab:
            what = f"d2t is missing, but the draft vocabulary has {kept} of {vocab} tokens."
            yield LintFinding("d2t-missing", what, "Drafts are taken for the first tokens of the vocabulary.")
        return
    yield from _mapped(tensors["d2t"], tensors.get("t2d"), vocab, kept)


def _mapped(d2t: Tensor, t2d: Tensor | None, vocab: int, kept: int) -> Iterator[LintFinding]:
    if d2t.shape != (kept,) or d2t.is_floating_point():
        what = f"d2t is {tuple(d2t.shape)} of {d2t.dtype}, expected {kept} whole numbers."
        yield LintFinding("d2t", what, "The engine stops, or drafts other tokens.")
        return
    ids = torch.arange(kept) + d2t.long()
    engine = "The engine adds each one's own place: it drafts other tokens, and nearly none is accepted."
    if _are_ids(d2t, t2d, vocab, kept):
        yield LintFinding("d2t-ids", "d2t holds token ids; engines expect offsets (target id − draft id).", engine)
    elif ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < kept:
        yield LintFinding("d2t", f"d2t does not name {kept} different tokens of the {vocab}.", engine)
    elif t2d is not None and not torch.equal(t2d.bool(), _mask(ids, len(t2d))):
        yield LintFinding("d2t", "d2t and t2d name different tokens.", engine)
    elif bool((ids.diff() < 0).any()):
        what = "d2t's tokens do not ascend, as trainers write them: its rows may be shifted."
        yield LintFinding(
            "d2t", what, "If they are, nearly no draft is accepted; if they are meant, all is right.", False
        )


def _are_ids(d2t: Tensor, t2d: Tensor | None, vocab: int, kept: int) -> bool:
    """Tell whether these are ids: they are those of t2d, or no two of them are equal though few tokens are left out.

    Offsets of a sorted vocabulary stay the same from one token to its neighbour; ids never do.
    """
    ids = d2t.long()
    if kept < 2 or ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < kept:
        return False
    if t2d is not None:
        return torch.equal(t2d.bool(), _mask(ids, len(t2d)))
    return bool((ids.diff() > 0).all())


def _mask(ids: Tensor, vocab: int) -> Tensor:
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[ids[(ids >= 0) & (ids < vocab)]] = True
    return kept


_CLASS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def _is_block(look: CheckpointView) -> bool:
    return look.layout.drafter in _CLASS


def _is_raw(look: CheckpointView) -> bool:
    return isinstance(look.layout, RawBlocks)


def _block_config(look: CheckpointView) -> dict[str, Any]:
    """Return where z-lab's layout keeps what others have at the top of config.json."""
    return look.config.get("dflash_config") or {}


# ------------------------------------------------------------ block drafters: taps


def block_taps(look: CheckpointView) -> Iterator[LintFinding]:
    """Find taps that are missing, out of order or range, or counted as another layout counts them."""
    if not _is_block(look):
        return
    name = RAW_TAPS if _is_raw(look) else BLOCK_TAPS
    found = look.config.get(name, _block_config(look).get(name))
    if not found:
        engine = "The engine stops, or silently taps layers of its own choice."
        yield LintFinding("taps-missing", f"config.json has no {name}.", engine)
        return
    if list(found) != sorted(set(found)):
        engine = "Engines sort them and take each once, so fc reads them in another order, or too few."
        yield LintFinding("taps-order", f"{name} is {found}.", engine)
    layers = (look.target and look.target.num_layers) or look.config.get("num_target_layers")
    if layers:
        yield from _counted_block_taps(look, name, [int(tap) for tap in found], int(layers))


def _counted_block_taps(look: CheckpointView, name: str, found: list[int], layers: int) -> Iterator[LintFinding]:
    here = 1 if _is_raw(look) else 0  # output i is hidden state i + 1
    least = -1 if look.layout.name == "deepspec" else 0
    if min(found) < least or max(found) > layers - here:
        yield LintFinding("taps-range", f"{name} is {found}, the target has {layers} layers.", "The engine fails.")
    if max(found) == layers - here:
        what = f"{name} is {found}: the last layer's output ({layers} layers)."
        yield LintFinding(
            "taps-last", what, "Engines give it before the target's final norm, libraries after it.", False
        )
    usual = [tap - here for tap in default_taps(layers, len(found))]
    for shift in (-1, 1):
        if len(found) > 1 and found == [tap + shift for tap in usual]:
            counted = "outputs of layers" if here else "hidden states, 0 for the embeddings"
            what = f"{name} is {found}: the usual {usual}, off by one (this layout counts {counted})."
            yield LintFinding(
                "taps-off-by-one", what, "The drafter reads neighbouring layers: τ falls, nothing is said."
            )


def target_layers(look: CheckpointView) -> Iterator[LintFinding]:
    """Find a drafter that says it was made for a target of another depth."""
    said = look.config.get("num_target_layers")
    layers = look.target and look.target.num_layers
    if _is_block(look) and said and layers and said != layers:
        what = f"num_target_layers is {said}, the target has {layers}."
        yield LintFinding("target-layers", what, "Its taps mean other layers there.")


# ------------------------------------------------------------ block drafters: slots


def block_mask(look: CheckpointView) -> Iterator[LintFinding]:
    """Find a mask token that is missing, outside the vocabulary, or one that texts have."""
    if not (_is_block(look) or look.layout.drafter == "peagle"):
        return
    found = look.config.get("mask_token_id", _block_config(look).get("mask_token_id"))
    if found is None:
        engine = "The engine stops, or embeds token 0 in every open slot."
        yield LintFinding("mask-missing", "config.json has no mask_token_id.", engine)
        return
    config = look.target.config if look.target is not None else {}
    vocab = config.get("vocab_size")
    if not 0 <= int(found) < (vocab or found + 1):
        yield LintFinding("mask", f"mask_token_id is {found}, the target has {vocab} tokens.", "The engine fails.")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        theirs = config.get(name)
        if found in (theirs if isinstance(theirs, list) else [theirs]):
            what = f"mask_token_id {found} is the target's {name}."
            yield LintFinding("mask", what, "Texts hold this token: open slots read as the end, or the start, of one.")


def block_slots(look: CheckpointView) -> Iterator[LintFinding]:
    """Find blocks whose size, layout or sight engines guess, each in its own way."""
    if not _is_block(look):
        return
    yield from (_raw_slots(look) if _is_raw(look) else _speculators_slots(look))
    layer = look.layout.layer(look.config) if isinstance(look.layout, BlockLayout) else {}
    if len(kinds := set(layer.get("layer_types") or [])) > 1:
        what = f"layer_types are {', '.join(sorted(kinds))}."
        yield LintFinding(
            "mixed-layers", what, "vLLM and SGLang read some layers' blocks causally and others' whole.", False
        )


def _raw_slots(look: CheckpointView) -> Iterator[LintFinding]:
    config, own = look.config, _block_config(look)
    inside, outside = own.get("block_size"), config.get("block_size")
    if inside is None and outside is None:
        yield LintFinding("block-size-missing", "config.json has no block_size.", "Engines take 16, or stop.")
    if None not in (inside, outside) and inside != outside:
        what = f"block_size is {outside}, and {inside} in dflash_config."
        yield LintFinding(
            "block-size", what, "Engines read one or the other: a block of another length says something else."
        )
    if look.layout.drafter == "dflash" and "causal" not in own and "is_causal" not in own:
        engine = "Engines take it from layer_types: causal where these are sliding_attention, else not."
        yield LintFinding("causal-missing", "dflash_config has no causal.", engine, False)
    if own.get("shift_label"):
        what = "dflash_config.shift_label is true: its first slot drafts, too."
        yield LintFinding(
            "layout", what, "Engines read DFlash's first slot as the root alone: every draft is one late."
        )
    if own.get("use_swa") or "sliding_attention" in (config.get("layer_types") or []):
        what = "its layers see a sliding window, which this layout counts nowhere."
        yield LintFinding(
            "window", what, "Engines count it from the slot or from the anchor, and read such layers causally."
        )


def _speculators_slots(look: CheckpointView) -> Iterator[LintFinding]:
    config, kind = look.config, look.layout.drafter
    if "sample_from_anchor" not in config:
        engine = "Missing, it is false for DFlash and true for DSpark, and false for both in llama.cpp."
        yield LintFinding("layout-missing", "config.json has no sample_from_anchor.", engine)
    elif kind == "dflash" and config["sample_from_anchor"]:
        what = "sample_from_anchor is true: DFlash's first slot would draft, too."
        yield LintFinding("layout", what, "speculators warns that engines may not serve it: every draft is one late.")
    layer = config.get("transformer_layer_config") or {}
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    if sliding and "sliding_window_non_causal" not in config:
        what = "its layers have a window, and config.json no sliding_window_non_causal."
        yield LintFinding("causal-missing", what, "vLLM then reads each block causally.", False)
    if sliding and not layer.get("sliding_window"):
        yield LintFinding(
            "window", "layer_types name a window, and sliding_window none.", "The engine stops, or guesses."
        )
    yield from _block_depth(config, kind)


def _block_depth(config: dict[str, Any], kind: str) -> Iterator[LintFinding]:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    asked, size = methods[0].get("speculative_tokens"), config.get("block_size")
    if asked is None or size is None:
        return
    most = int(size) - (not config.get("sample_from_anchor", kind == "dspark"))
    if int(asked) != most:
        what = f"speculative_tokens is {asked}, and a block of {size} drafts {most}."
        engine = "Engines read as many slots as they draft: another block than it was trained on says something else."
        yield LintFinding("block-depth", what, engine, int(asked) > most)


# ------------------------------------------------------------ block drafters: heads beside the block


def block_architecture(look: CheckpointView) -> Iterator[LintFinding]:
    """Find architectures under which an engine would take the drafter for another one."""
    if not _is_block(look):
        return
    names, kind = list(look.config.get("architectures") or []), look.layout.drafter
    projector = _block_config(look).get("projector_type", look.config.get("projector_type"))
    if projector is not None:
        what = f"projector_type is {projector!r} under {', '.join(names)}."
        engine = "SGLang drops such heads without a word and reads the first slot as the root; TensorRT-LLM reads them."
        yield LintFinding("projector", what, engine)
    if _is_raw(look) and "DSparkDraftModel" in names:
        what = "architectures name DSparkDraftModel without speculators_model_type."
        yield LintFinding("architecture", what, "vLLM takes it for DeepSeek-V4's class; write Qwen3DSparkModel.")
    if not _is_raw(look) and names and _CLASS[kind] not in names:
        what = f"architectures are {names} for a {kind} drafter; published files name {_CLASS[kind]}."
        yield LintFinding("architecture", what, "Engines that go by the class do not know it.", False)


def block_heads(look: CheckpointView) -> Iterator[LintFinding]:
    """Find DSpark's heads that config.json and the tensors do not agree about, or that some engine lacks."""
    if not _is_block(look):
        return
    flat = sorted(name for name in look.tensors if name.startswith(("markov_w1.", "markov_w2.", "confidence_proj.")))
    if flat:
        what = f"{flat[0]} has a flat name; engines read markov_head.* and confidence_head.*."
        yield LintFinding("head-names", what, "SGLang drops it for DFlash and stops for DSpark.")
    if look.layout.drafter != "dspark":
        return
    config = look.config
    for flag, prefix in (("enable_confidence_head", "confidence_head."), ("markov_rank", "markov_head.")):
        there = any(name.startswith(prefix) for name in look.tensors)
        if there != bool(config.get(flag)):
            what = (
                f"{flag} is {config.get(flag, 'absent')}, but the file has {'a' if there else 'no'} tensor {prefix}*."
            )
            yield LintFinding(
                "head-flag", what, "SGLang stops where a head that is named is missing, and drops another."
            )
    if config.get("markov_head_type", "vanilla") != "vanilla":
        what = f"markov_head_type is {config['markov_head_type']!r}."
        yield LintFinding("markov-kind", what, "vLLM serves the vanilla head only; SGLang all three.", False)


# ------------------------------------------------------------ all checks

# Every check is asked of every checkpoint; one that does not concern a layout finds nothing in it.
CHECKS: tuple[Callable[[CheckpointView], Iterator[LintFinding]], ...] = (
    numbers,
    untrained_norms,
    names_and_shapes,
    frequencies,
    changed_tensors,
    changed_config,
    depths,
    rotary_positions,
    embeddings,
    eagle_taps,
    norm_flags,
    draft_vocabulary,
    tied_embeddings,
    block_taps,
    target_layers,
    block_mask,
    block_slots,
    block_architecture,
    block_heads,
)


def lint(folder: str | Path, target: str | None = None) -> list[LintFinding]:
    """Return what is wrong in the drafter's files in `folder`, faults first; [] for nothing.

    Args:
        target: the target's folder; None takes the one that the files name, if it is on this machine.

    Raises:
        BadInputError: there is no checkpoint in a known layout, or its files cannot be read.
    """
    folder = Path(folder).expanduser()
    if not any(folder.glob("*.safetensors")) and (pickled := list(pickles(folder))):
        return pickled
    layout = recognised(folder)
    with nonsense_explained(folder):
        look = CheckpointView.at(folder, layout, target)
        findings = [*pickles(folder), *(finding for check in CHECKS for finding in check(look))]
    return sorted(findings, key=lambda finding: not finding.is_fault)
