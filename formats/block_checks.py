"""Checks of block drafters: what goes wrong between those who write DFlash and DSpark and those who read them.

Shapes: S slots of a block, k drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..heads.block.dflash import default_taps
from . import blocks, raw_blocks
from .checkpoint_view import LintFinding, Look

_CLASS = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def _is_block(look: Look) -> bool:
    return look.layout.drafter in _CLASS


def _is_raw(look: Look) -> bool:
    return isinstance(look.layout, raw_blocks.RawBlocks)


def _own(look: Look) -> dict[str, Any]:
    """Return where z-lab's layout keeps what others have at the top of config.json."""
    return look.config.get("dflash_config") or {}


# ------------------------------------------------------------ taps


def taps(look: Look) -> Iterator[LintFinding]:
    """Find taps that are missing, out of order or range, or counted as another layout counts them."""
    if not _is_block(look):
        return
    name = raw_blocks.TAPS if _is_raw(look) else blocks.TAPS
    found = look.config.get(name, _own(look).get(name))
    if not found:
        engine = "The engine stops, or silently taps layers of its own choice."
        yield LintFinding("taps-missing", f"config.json has no {name}.", engine)
        return
    if list(found) != sorted(set(found)):
        engine = "Engines sort them and take each once, so fc reads them in another order, or too few."
        yield LintFinding("taps-order", f"{name} is {found}.", engine)
    layers = (look.target and look.target.num_layers) or look.config.get("num_target_layers")
    if layers:
        yield from _counted(look, name, [int(tap) for tap in found], int(layers))


def _counted(look: Look, name: str, found: list[int], layers: int) -> Iterator[LintFinding]:
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


def target_layers(look: Look) -> Iterator[LintFinding]:
    """Find a drafter that says it was made for a target of another depth."""
    said = look.config.get("num_target_layers")
    layers = look.target and look.target.num_layers
    if _is_block(look) and said and layers and said != layers:
        what = f"num_target_layers is {said}, the target has {layers}."
        yield LintFinding("target-layers", what, "Its taps mean other layers there.")


# ------------------------------------------------------------ blocks


def mask(look: Look) -> Iterator[LintFinding]:
    """Find a mask token that is missing, outside the vocabulary, or one that texts have."""
    if not (_is_block(look) or look.layout.drafter == "peagle"):
        return
    found = look.config.get("mask_token_id", _own(look).get("mask_token_id"))
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


def slots(look: Look) -> Iterator[LintFinding]:
    """Find blocks whose size, layout or sight engines guess, each in its own way."""
    if not _is_block(look):
        return
    yield from (_raw_slots(look) if _is_raw(look) else _speculators_slots(look))
    layer = look.layout.layer(look.config) if isinstance(look.layout, blocks.BlockLayout) else {}
    if len(kinds := set(layer.get("layer_types") or [])) > 1:
        what = f"layer_types are {', '.join(sorted(kinds))}."
        yield LintFinding(
            "mixed-layers", what, "vLLM and SGLang read some layers' blocks causally and others' whole.", False
        )


def _raw_slots(look: Look) -> Iterator[LintFinding]:
    config, own = look.config, _own(look)
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


def _speculators_slots(look: Look) -> Iterator[LintFinding]:
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
    yield from _depth(config, kind)


def _depth(config: dict[str, Any], kind: str) -> Iterator[LintFinding]:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    asked, size = methods[0].get("speculative_tokens"), config.get("block_size")
    if asked is None or size is None:
        return
    most = int(size) - (not config.get("sample_from_anchor", kind == "dspark"))
    if int(asked) != most:
        what = f"speculative_tokens is {asked}, and a block of {size} drafts {most}."
        engine = "Engines read as many slots as they draft: another block than it was trained on says something else."
        yield LintFinding("block-depth", what, engine, int(asked) > most)


# ------------------------------------------------------------ heads beside the block


def architecture(look: Look) -> Iterator[LintFinding]:
    """Find architectures under which an engine would take the drafter for another one."""
    if not _is_block(look):
        return
    names, kind = list(look.config.get("architectures") or []), look.layout.drafter
    projector = _own(look).get("projector_type", look.config.get("projector_type"))
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


def heads(look: Look) -> Iterator[LintFinding]:
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
