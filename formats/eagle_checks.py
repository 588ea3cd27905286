"""Checks of heads of EAGLE's kind: taps, norm flags, names, shapes, draft vocabulary.

Shapes: H hidden size, K taps, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checkpoint_view import LintFinding, Look
from .sglang import as_speculators
from .speculators import Speculators

_TAPS = "eagle_aux_hidden_state_layer_ids"


def _is_eagle3(look: Look) -> bool:
    return look.layout.drafter in ("eagle3", "peagle")


def _is_speculators(look: Look) -> bool:
    return isinstance(look.layout, Speculators)


def _named(look: Look) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors in the words of the `speculators` layout."""
    if _is_speculators(look):
        return look.config, look.tensors
    same = as_speculators(look.found, (look.target and look.target.num_layers) or 12)
    return same.config, same.tensors


def _own_taps(look: Look) -> list[int] | None:
    """Return the taps as they are written, in the layout's own numbering; None if they are missing."""
    if _is_speculators(look):
        return look.config.get(_TAPS)
    return (look.config.get("eagle_config") or {}).get(_TAPS)


# ------------------------------------------------------------ taps


def taps(look: Look) -> Iterator[LintFinding]:
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
    yield from _counted(look, list(found))


def _counted(look: Look, found: list[int]) -> Iterator[LintFinding]:
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


# ------------------------------------------------------------ norm flags


def norm_flags(look: Look) -> Iterator[LintFinding]:
    """Find flags that are missing, or that the tensors contradict."""
    if not _is_eagle3(look):
        return
    config, tensors = _named(look)
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


def tied(look: Look) -> Iterator[LintFinding]:
    """Find a config that makes engines take the embeddings in place of the head's own output embedding."""
    layer = look.config.get("transformer_layer_config") or {}
    if _is_eagle3(look) and (look.config.get("tie_word_embeddings") or layer.get("tie_word_embeddings")):
        what = "tie_word_embeddings is true, but the head has an output embedding of its own."
        yield LintFinding("tied", what, "SGLang drafts with the target's embeddings in its place.")


# ------------------------------------------------------------ draft vocabulary


def vocabulary(look: Look) -> Iterator[LintFinding]:
    """Find a draft vocabulary that is missing, of ids instead of offsets, or not the one of t2d."""
    if not _is_eagle3(look):
        return
    config, tensors = _named(look)
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
