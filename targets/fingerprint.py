"""Identity by content: digests of all that changes a target's texts, and of no paths, dates or machines.

It needs no torch, so that a pair can be compared with its digests in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.digests import LIST, digest_json, file_digest, is_harmless

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Config fields about where or with what a model was saved, not about what it computes.
_INCIDENTAL = {"_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"}
_INCIDENTAL |= {"_attn_implementation", "_attn_implementation_autoset"}
_NAMED = 3  # weights, in a sentence about those that differ


@dataclass(frozen=True)
class Fingerprint:
    """A target's identity by content: SHA-256 of canonical forms. Targets with equal fingerprints write the same.

    generation_config.json is left out: only the tokens that end a text are read of it, and they change none before.
    """

    tensors: dict[str, str]  # by name, dtype and shape included
    config: str
    tokenizer: str | None  # None where the target has none
    chat_template: str | None
    dtype: str  # of the weights, such as "bfloat16"
    digest: str = field(init=False)  # of all of these together

    def __post_init__(self) -> None:
        parts = {k: getattr(self, k) for k in ("tensors", "config", "tokenizer", "chat_template", "dtype")}
        object.__setattr__(self, "digest", digest_json(parts))

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        digest: Callable[[torch.Tensor], str],
    ) -> Fingerprint:
        """Return the fingerprint of a model with its tokenizer; every weight is read once, by `digest`."""
        template = getattr(tokenizer, "chat_template", None)
        return cls(
            tensors={name: digest(tensor) for name, tensor in sorted(model.state_dict(keep_vars=True).items())},
            config=digest_json(plain_config(model)),
            tokenizer=None if tokenizer is None else digest_tokenizer(tokenizer),
            chat_template=None if template is None else digest_json(template),
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Fingerprint:
        return cls(**{k: v for k, v in saved.items() if k != "digest"})

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the parts of `other` that differ from this one, in words for people."""
        parts = ("config", "tokenizer", "chat_template", "dtype")
        changed = [name for name in parts if getattr(self, name) != getattr(other, name)]
        return changed + _changed_weights(self.tensors, other.tensors)


def precision_name(source: Mapping[str, str | None], dtype: str) -> str:
    """Return the precision of a target's weights: `W4A16 (compressed-tensors)`, `int8 (torchao)`, or its dtype."""
    made = f"{source['quantize']} (torchao)" if source.get("quantize") else None
    return made or source.get("precision") or source.get("gguf_type") or dtype


def _changed_weights(own: dict[str, str], others: dict[str, str]) -> list[str]:
    """Return how many weights of one name differ, are missing in `others`, and are new there, in words."""
    shared = own.keys() & others.keys()
    changed = sorted(name for name in shared if own[name] != others[name])
    missing, new = sorted(own.keys() - others.keys()), sorted(others.keys() - own.keys())
    words = [f"{len(changed)} of {len(shared)} weights (first: {', '.join(changed[:_NAMED])})"] if changed else []
    words += [f"{len(missing)} missing weights (first: {missing[0]})"] if missing else []
    return words + ([f"{len(new)} additional weights (first: {new[0]})"] if new else [])


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's contents, which are read now."""
    return file_digest(path, again=True)


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file under `folder` but the list of their digests, by its path in there."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != LIST and not is_harmless(p)]
    return {p.relative_to(folder).as_posix(): digest_file(p) for p in files}


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's own serialisation, or of the vocabulary and special tokens of a slow one."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None  # call-time settings
        return digest_json(state)
    return digest_json([sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])


def plain_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of a model's config that change what it computes, as plain values."""
    return _without_incidentals(model.config.get_text_config().to_dict())


def _without_incidentals(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_incidentals(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _INCIDENTAL
    }
