"""The engines that serve each drafter: the layout that each reads, and how it is started.

Engines count drafts differently. vLLM's `num_speculative_tokens` is our depth. SGLang has steps, children of a node and
tokens that are verified, the root included: depth, 1 and depth + 1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common import BadInputError, IncompatibleError
from ..common.errors import did_you_mean
from ..common.plugins import plugins
from ..heads import DrafterConfig, head_class
from .base_layout import ExportLayout, Fields
from .blocks import DFLASH, DFLASH2, DSPARK, SpeculatorsBlocks
from .compression import PRECISIONS
from .draft_models import FILE as GGUF_FILE
from .draft_models import Gguf, Plain
from .eagle_layouts import EagleLayout, Sglang
from .early_exit import EarlyExit
from .gguf_heads import GgufDFlash, GgufEagle3
from .medusa_layouts import MedusaRepository, MedusaVllm
from .mtp_layout import NativeMtp
from .raw_blocks import DeepSpec, ZLab
from .speculators import Speculators, SpeculatorsPEagle

# By `--to`, the drafters that can be written for it, and their layouts; packages add to it under `outrider.layouts`.
LAYOUTS: dict[str, dict[str, ExportLayout]] = {
    "vllm": {
        "eagle3": Speculators(embeddings=False),
        "eagle1": EagleLayout("vllm"),
        "medusa": MedusaVllm(),
        "draft_model": Plain(PRECISIONS),
        "mtp": NativeMtp(),
        "dflash": SpeculatorsBlocks(DFLASH, vllm=True),
        "dflash2": SpeculatorsBlocks(DFLASH2, vllm=True),
        "dspark": SpeculatorsBlocks(DSPARK, vllm=True),
    },
    "speculators": {
        "eagle3": Speculators(),
        "dflash": SpeculatorsBlocks(DFLASH),
        "dflash2": SpeculatorsBlocks(DFLASH2),
        "dspark": SpeculatorsBlocks(DSPARK),
        "peagle": SpeculatorsPEagle(),
    },
    "sglang": {
        "eagle3": Sglang(),
        "eagle1": EagleLayout("sglang"),
        "draft_model": Plain(),
        "mtp": NativeMtp(),
        "dflash": ZLab(DFLASH),
        "dflash2": ZLab(DFLASH2),
        "dspark": DeepSpec(),
    },
    "z-lab": {"dflash": ZLab(DFLASH), "dflash2": ZLab(DFLASH2)},
    "deepspec": {"dspark": DeepSpec()},
    "hf": {"draft_model": Plain(), "self_speculative": EarlyExit()},
    "medusa": {"medusa": MedusaRepository()},
    "eagle": {"eagle1": EagleLayout("eagle")},
    "gguf": {"draft_model": Gguf(), "eagle3": GgufEagle3(), "dflash": GgufDFlash()},
}
for _layouts in plugins("layouts").values():
    for _to, _by_drafter in _layouts.items():
        LAYOUTS.setdefault(_to, {}).update(_by_drafter)
_OTHER_NAMES = {"llama.cpp": "gguf"}  # the engine's, and that of its format

# Every layout once, in the order in which they are tried on a config.json: whatever is nothing else is a draft model.
_TRIED_LAST = ["", NativeMtp.name, Plain.name]
_by_name = {(one.name, one.drafter): one for layouts in LAYOUTS.values() for one in layouts.values()}
KNOWN = tuple(sorted(_by_name.values(), key=lambda one: _TRIED_LAST.index(one.name) if one.name in _TRIED_LAST else 0))


@dataclass(frozen=True)
class EngineLaunch:
    """How an engine is started with an export.

    Attributes:
        engine: its name.
        command: one line for a shell; None for a layout that several programs read.
        settings: the part of it that configures drafting, as the engine takes it.
        oldest: the first version of the engine that reads the export as it is meant; None where none is known.
        adapter: of a target that is served as a LoRA module: its `name`, by which requests ask, `path` and `rank`.
    """

    engine: str
    command: str | None
    settings: dict[str, Any]
    oldest: str | None = None
    adapter: dict[str, Any] | None = None


def layout_of(to: str, drafter: str) -> ExportLayout:
    """Return the layout of a drafter of this type for `to`.

    Raises:
        BadInputError: `to` is unknown.
        IncompatibleError: it has no layout for this type; those that it has are named.
    """
    to = _OTHER_NAMES.get(to, to)
    if to not in LAYOUTS:
        known = [*LAYOUTS, *_OTHER_NAMES]
        raise BadInputError(f"unknown format or engine {to!r}; {did_you_mean(to, known)}known: {', '.join(known)}.")
    if not head_class(drafter).trainable and drafter not in LAYOUTS[to]:
        raise IncompatibleError(
            f"{to} reads no {drafter} drafter. One without weights is a setting of the engine (vLLM: "
            '{"method": "ngram", "prompt_lookup_max": …} or {"method": "suffix"}, SGLang: NGRAM); of one that is made '
            "around a trained drafter, export that one."
        )
    if drafter not in LAYOUTS[to]:
        others = [name for name, layouts in LAYOUTS.items() if drafter in layouts]
        elsewhere = f"; {drafter} drafters can go to: {', '.join(others)}" if others else ""
        raise IncompatibleError(f"{to} serves no {drafter} drafter; it serves: {', '.join(LAYOUTS[to])}{elsewhere}.")
    return LAYOUTS[to][drafter]


def require_served(to: str, drafter: str, config: DrafterConfig, num_layers: int = -1) -> ExportLayout:
    """Return the layout of a drafter for `to`, if it can serve one with these settings.

    `num_layers`: the target's; −1 is unknown, and passes a tap of its last state.

    Raises BadInputError or IncompatibleError: as `layout_of`, or a setting that cannot be served, with the nearest that
    can.
    """
    layout = layout_of(to, drafter)
    if lacks := layout.lacks(config, num_layers):
        raise IncompatibleError(f"{to} cannot serve this drafter. {'. '.join(map(str, lacks))}.")
    return layout


def oldest_version(to: str, drafter: str, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first version of an engine that reads a drafter of these settings, and why older ones do not.

    None where none is known. SGLang's were found in its packages, 0.5.9 to 0.5.23.
    """
    is_plain = not config.get("norm_taps") and not config.get("norm_output") and len(config.get("taps", ())) == 3
    known = {
        "eagle3": ("0.5.12", "older copies drop fc_norm and norm_output without a word, and read three taps"),
        "dflash": ("0.5.11", "older copies know no dflash"),
        "dspark": ("0.5.16", "older copies know no dspark"),
    }
    if drafter == "dflash" and config.get("causal"):
        known[drafter] = ("0.5.17", "older copies read every block whole, whatever is_causal says")
    return known.get(drafter) if to == "sglang" and not (drafter == "eagle3" and is_plain) else None


def launch(
    to: str,
    drafter: str,
    target: str,
    folder: str,
    depth: int,
    dtype: str = "auto",
    rates: Sequence[float] = (),
) -> EngineLaunch:
    """Return the launch of `to` with a drafter of this type.

    Args:
        target: the target's path or Hub id, as the engine will find it.
        folder: the export's.
        depth: draft tokens of a round, in our counting.
        dtype: of the target's weights, as it was measured.
        rates: how probable a round is to keep at least 1, 2, … `depth` drafts, whatever is proposed: the engine's
            synthetic mode, whose texts are not the target's. () for real acceptance.

    Raises IncompatibleError where the engine has no synthetic mode.
    """
    to = _OTHER_NAMES.get(to, to)
    more: Fields = {}
    if layout := LAYOUTS.get(to, {}).get(drafter):
        drafter, more = layout.served_as or drafter, layout.launch_settings
    if rates and to not in ("vllm", "gguf"):
        raise IncompatibleError(f"{to} cannot be told how many drafts to keep; vllm and llama.cpp can.")
    if to == "vllm":
        return _vllm(drafter, target, folder, depth, dtype, rates, more)
    if to == "sglang":
        return _sglang(drafter, target, folder, depth, dtype)
    if drafter == "self_speculative":
        return EngineLaunch("transformers", None, {"model": folder, "num_assistant_tokens": depth})
    if to == "hf":
        settings = {"assistant_model": folder, "num_assistant_tokens": depth}
        return EngineLaunch("transformers", None, settings | {"num_assistant_tokens_schedule": "constant"})
    if to == "gguf":
        return _llama(drafter, f"{folder}/{GGUF_FILE}", depth, rates)
    return EngineLaunch(to, None, {"depth": depth})


_SGLANG_ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle1": "EAGLE",
    "draft_model": "STANDALONE",
    "mtp": "NEXTN",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM knows


def lora_words(adapter: Mapping[str, Any]) -> list[str]:
    """Return the words by which a vLLM serves an adapter as a LoRA module."""
    rank = next((r for r in _LORA_RANKS if r >= adapter["rank"]), adapter["rank"])
    module = {name: adapter[name] for name in ("name", "path")}
    return ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", json.dumps(module)]


def _vllm(
    drafter: str,
    target: str,
    folder: str,
    depth: int,
    dtype: str,
    rates: Sequence[float],
    more: Fields,
) -> EngineLaunch:
    method = "eagle" if drafter == "eagle1" else drafter
    settings: dict[str, Any] = {"method": method, "model": folder, "num_speculative_tokens": depth}
    if drafter == "mtp":  # the drafter is a part of the target's checkpoint
        target = str(settings.pop("model"))
    if drafter != "medusa":  # whose drafts are always the most probable tokens
        # Without this the drafts above temperature 0 are greedy, and a third of what drafting gains is lost.
        settings["draft_sample_method"] = "probabilistic"
    settings |= more
    if rates:
        settings |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    words = ["vllm", "serve", target, "--dtype", dtype, "--speculative-config", json.dumps(settings)]
    return EngineLaunch("vllm", shlex.join(words), settings)


def _sglang(drafter: str, target: str, folder: str, depth: int, dtype: str) -> EngineLaunch:
    settings: dict[str, Any] = {
        "speculative-algorithm": _SGLANG_ALGORITHMS[drafter],
        "speculative-draft-model-path": folder,
        "speculative-num-steps": depth,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": depth + 1,
    }
    if drafter in ("dflash", "dspark"):  # one pass, one token at each place
        del settings["speculative-num-steps"], settings["speculative-eagle-topk"]
    if drafter == "mtp":
        target = str(settings.pop("speculative-draft-model-path"))
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, "--dtype", dtype, *_flags(settings)]
    return EngineLaunch("sglang", shlex.join(words), settings)


_LLAMA_TYPES = {"draft_model": "draft-simple", "eagle3": "draft-eagle3", "dflash": "draft-dflash"}


def _llama(drafter: str, file: str, depth: int, rates: Sequence[float]) -> EngineLaunch:
    # Without spec-draft-p-min it ends a draft at the first token that the draft model is not sure of, and unless told
    # otherwise it picks the most probable drafts at any temperature.
    settings = {
        "model-draft": file,
        "spec-type": _LLAMA_TYPES[drafter],
        "spec-draft-n-max": depth,
        "spec-draft-n-min": 0,
        "spec-draft-p-min": 0.0,
        **({"spec-draft-sampling": "probabilistic"} if drafter == "draft_model" else {}),  # heads never read it
    }
    if rates:
        settings["spec-synth-rates"] = ",".join(map(str, rates))
    words = ["llama-server", "--model", "TARGET.gguf", *_flags(settings)]
    return EngineLaunch("llama.cpp", shlex.join(words), settings)


def _flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
