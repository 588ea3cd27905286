"""Checks of any layout: files, numbers, changes since the export, depth, rotary positions, embeddings.

Shapes: H hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import IncompatibleError, OutriderError
from ..targets.model_folder import PICKLES
from .checkpoint_view import LintFinding, Look
from .import_ import NONSENSE
from .llama import EMBEDDINGS
from .record import digest

_INV_FREQ = "inv_freq"
_UNREADABLE: tuple[type[Exception], ...] = (OutriderError, *NONSENSE)


def pickles(folder: Path) -> Iterator[LintFinding]:
    """Find pickles beside the weights."""
    for file in sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
        yield LintFinding("pickle", f"{file} is a pickle.", "An engine that opens it runs whatever code it holds.")


def numbers(look: Look) -> Iterator[LintFinding]:
    """Find tensors that hold no weights: NaN, infinite, or all zero where a product would vanish."""
    for name, tensor in look.tensors.items():
        if not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            found = f"{name} holds numbers that are not finite."
            yield LintFinding("not-finite", found, "Its drafts are NaN: none is accepted.")
        elif tensor.ndim == 2 and not tensor.any():
            yield LintFinding("zeros", f"{name} is all zeros.", "What it multiplies is lost, so drafts are poor.")


def initial(look: Look) -> Iterator[LintFinding]:
    """Find weights that training never moved."""
    norms = [n for n, t in look.tensors.items() if t.ndim == 1 and t.is_floating_point() and n.endswith("norm.weight")]
    untouched = [n for n in norms if (look.tensors[n] == 1).all()]
    if norms and len(untouched) == len(norms):
        found = f"all {len(norms)} norms are exactly 1, as before training."
        yield LintFinding("initial", found, "The engine would draft with an untrained head.")
    for name in untouched if len(untouched) < len(norms) else []:
        yield LintFinding("initial", f"{name} is exactly 1, as before training.", "It may not have been loaded.", False)


def names_and_shapes(look: Look) -> Iterator[LintFinding]:
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


def _spelled(look: Look) -> Iterator[LintFinding]:
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


def frequencies(look: Look) -> Iterator[LintFinding]:
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


def changed_tensors(look: Look) -> Iterator[LintFinding]:
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


def changed_config(look: Look) -> Iterator[LintFinding]:
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


def depths(look: Look) -> Iterator[LintFinding]:
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


def rope(look: Look) -> Iterator[LintFinding]:
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


def _other_base(look: Look, base: float | None) -> Iterator[LintFinding]:
    if look.target is None or base is None:
        return
    config = look.target.config
    theirs = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta"))
    if theirs is not None and theirs != base:
        found = f"the rotary base is {base:g}, the target's {theirs:g}."
        yield LintFinding(
            "rope-base", found, "If the head was trained with the target's, later drafts are wrong.", False
        )


def embeddings(look: Look) -> Iterator[LintFinding]:
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
