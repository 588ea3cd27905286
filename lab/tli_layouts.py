"""A draft model with another tokenizer as vLLM reads it (0.32, `use_heterogeneous_vocab`).

vLLM makes the map itself when it starts, from the spellings of both tokenizers: written down here a second time.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..common import IncompatibleError
from ..formats.base_layout import DrafterFiles, ExportLayout, Fields, Unsupported
from ..formats.engine_logits import ProbeSequence
from ..targets import Target, load_causal_lm, load_tokenizer
from .tli import Tli, TliConfig

_MARKS = ("\u0120", "\u2581")  # of a space, where a tokenizer does not show its own


class VllmTli(ExportLayout[Tli, TliConfig]):
    """Draft models with another tokenizer, each token that only the target has read as the unknown token."""

    name = "hf, two vocabularies"
    drafter = "tli"
    is_model = True
    served_as = "draft_model"
    launch_settings: ClassVar = {"draft_sample_method": "greedy", "use_heterogeneous_vocab": True}

    def lacks(self, config: TliConfig, num_layers: int) -> list[Unsupported]:
        if not config.pieces:
            return []
        why = "vLLM reads tokens that only the target has as the draft model's unknown token"
        return [Unsupported(f"pieces: {config.pieces}", why, "pieces: 0, trained so")]

    def save(self, drafter: Tli, target: Target, folder: Path, depth: int) -> None:
        if drafter.tokenizer is None:
            raise IncompatibleError("vLLM makes the map from the draft model's tokenizer, and this one has none.")
        theirs = target.require_tokenizer()
        engine = engine_map(theirs, drafter.tokenizer, target.vocab_size, drafter.runner.vocab_size)
        ours = dict(zip(drafter.vocabulary.target_ids.tolist(), drafter.vocabulary.own_ids.tolist(), strict=True))
        if apart := sorted(i for i in engine.keys() | ours.keys() if engine.get(i) != ours.get(i)):
            raise IncompatibleError(
                f"vLLM would join other tokens than this drafter: of {len(apart)} the target's "
                f"{theirs.convert_ids_to_tokens(apart[0])!r} (id {apart[0]}) is {engine.get(apart[0])} there and "
                f"{ours.get(apart[0])} here. It compares spellings, not bytes or roles: give special tokens the "
                "target's names, and train again."
            )
        drafter.save(folder)

    @torch.no_grad()
    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        own = load_tokenizer(files.folder)
        assert own is not None
        model = load_causal_lm(str(files.folder), dtype=torch.float32, strict=True).eval().to(passage.tokens.device)
        size = model.get_output_embeddings().weight.shape[0]
        joined = engine_map(target.require_tokenizer(), own, target.vocab_size, size)
        unknown = own.eos_token_id if own.unk_token_id is None else own.unk_token_id
        text = torch.tensor([[joined.get(i, unknown) for i in passage.text.tolist()]], device=passage.tokens.device)
        drafted = model(text, use_cache=False).logits[0, -1 - len(passage.drafts) :].float()
        wide = drafted.new_full((len(drafted), target.vocab_size), -torch.inf)
        wide[:, list(joined)] = drafted[:, list(joined.values())]
        return wide

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return config.get("drafter_type") == self.drafter

    def read(self, files: DrafterFiles, target: Target) -> Tli:
        return Tli.from_folder(files.folder, files.config, target)


def engine_map(
    theirs: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, size: int, own_size: int
) -> dict[int, int]:
    """Return the draft model's id of each of the target's that vLLM joins: those of one spelling, the first of each."""
    spelled = [_by_spelling(tokenizer) for tokenizer in (theirs, own)]
    both = {spelled[0][word]: spelled[1][word] for word in spelled[0].keys() & spelled[1].keys()}
    return {i: j for i, j in sorted(both.items()) if i < size and j < own_size}


def _by_spelling(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    marks = _space_marks(tokenizer)
    found: dict[str, int] = {}
    for token, i in tokenizer.get_vocab().items():
        mark = next((mark for mark in marks if token.startswith(mark)), None)
        found.setdefault(token if mark is None else " " + token[len(mark) :], i)
    return found


def _space_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return what tokens begin with in place of a space, seen in the first token of " a"."""
    ids = tokenizer.encode(" a", add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else None
    is_marked = isinstance(first, str) and len(first) > 1 and first.endswith("a") and first[0] not in " \t"
    return (str(first)[:-1],) if is_marked else _MARKS
