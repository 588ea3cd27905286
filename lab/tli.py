"""A draft model with another tokenizer than the target's, which drafts the tokens of both (TLI, arXiv 2502.05202).

A token of the target that is one token in both vocabularies is drafted: the model's distribution is restricted to
these, and renormalised (algorithm 4). Text is lossless whatever is drafted; the target's other tokens are corrections.

The model reads the target's text token by token: a shared token as its own, any other as the tokens of its own
vocabulary that spell the same bytes. So what it has read of a text depends on the text's tokens alone, and the drafts
of a round take one entry of its cache each.

Shapes: B rows, Q tokens of the target, P tokens of the model's own, V target vocabulary, V' tokens of both, N pieces of
all of the target's tokens, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common import BadInputError, IncompatibleError
from ..common.atomic import replacing
from ..heads.base import DrafterLoss, TargetBatch, teacher_forced_loss
from ..heads.draft_model import DraftModel, DraftModelConfig, DraftModelSession
from ..heads.session import Abilities, joined
from ..targets import RaggedCache, RowLengths, Target, load_causal_lm, load_tokenizer
from ..targets.fingerprint import digest_json
from ..targets.fused_layers import LlamaRunner, runs
from ..targets.loading import target_path
from ..targets.model_folder import model_folder
from ..targets.weights import stored_tensors
from .transplant import token_bytes, token_pieces

MAP = "vocabulary/map.safetensors"  # not beside the weights: engines read every such file there
_SETTINGS = "tli"  # in config.json of the checkpoint
_SCHEMA = 1

_log = logging.getLogger(__name__)


class VocabularyMap(nn.Module):
    """How the target's tokens stand in the draft model's vocabulary.

    Args:
        target_ids, own_ids: the ids of each token that both have, `[V']`; the target's ascend.
        pieces: the model's ids that each of the target's tokens is read as, one token's after the other's, `[N]`.
        counts: how many of them are each token's, at least 1, `[V]`.
    """

    target_ids: Tensor
    own_ids: Tensor
    pieces: Tensor
    counts: Tensor
    ends: Tensor

    def __init__(self, target_ids: Tensor, own_ids: Tensor, pieces: Tensor, counts: Tensor):
        super().__init__()
        for name, ids in (("target_ids", target_ids), ("own_ids", own_ids), ("pieces", pieces), ("counts", counts)):
            self.register_buffer(name, ids)
        self.register_buffer("ends", counts.cumsum(0), persistent=False)  # of each token's pieces
        # Known on the host, also for plans without contents.
        self.longest = 1 if counts.is_meta else int(counts.max())

    @classmethod
    def of(cls, own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, size: int, most: int) -> VocabularyMap:
        """Return the map between two tokenizers, for a target of `size` ids.

        Tokens are compared by the bytes that they stand for; special ones by name, and by their role.

        Args:
            most: a token that only the target has is read as the last `most` of its pieces; 0: as the unknown token.

        Raises IncompatibleError if they share no token.
        """
        found = token_pieces(own, theirs, size)
        drafted = {found.pieces[i][0]: i for i in found.shared}  # where two are the same for the model, the later one
        if theirs.eos_token_id in found.shared:  # a drafter must be able to end
            drafted[found.pieces[theirs.eos_token_id][0]] = theirs.eos_token_id
        if not drafted:
            raise IncompatibleError(
                "the two vocabularies share no token, so nothing could be drafted; take a draft model of another "
                "family, or give it the target's tokenizer (outrider lab transplant)."
            )
        shared = set(found.shared)
        unknown = [own.unk_token_id if own.unk_token_id is not None else own.eos_token_id]
        pieces = [each if i in shared else (each[-most:] if most else []) for i, each in enumerate(found.pieces)]
        if unknown == [None] and not all(pieces):
            raise IncompatibleError(
                "the draft model's tokenizer has neither an unknown nor an end token to read in place of "
                f"{pieces.count([]):,} of the target's tokens, whose bytes it cannot spell; name one of them in its "
                "tokenizer_config.json (unk_token)."
            )
        pieces = [each or unknown for each in pieces]
        pairs = sorted((theirs, ours) for ours, theirs in drafted.items())
        flat = [piece for each in pieces for piece in each]
        lists = ([i for i, _ in pairs], [i for _, i in pairs], flat, [len(each) for each in pieces])
        return cls(*(torch.tensor(values, dtype=torch.long, device="cpu") for values in lists))

    def spell(self, tokens: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the model's ids for tokens `[B, Q]`, `[B, P]`, and where there each token ends, `[B, Q]`.

        A row with fewer ids is padded on the right. Token q's last id stands before its end.

        `real`: tokens that are left out are False, `[B, Q]`.
        """
        if tokens.is_meta:  # only sizes are planned: as many ids as tokens
            return tokens, torch.ones_like(tokens).cumsum(1)
        counts = self.counts[tokens] if real is None else self.counts[tokens] * real
        ends = counts.cumsum(1)
        slots = torch.arange(int(ends[:, -1].max()), device=tokens.device).expand(len(tokens), -1).contiguous()
        index = torch.searchsorted(ends, slots, right=True).clamp(max=tokens.shape[1] - 1)  # the token of each slot
        behind = self.ends[tokens.gather(1, index)] - ends.gather(1, index) + slots
        return self.pieces[behind.clamp(0, len(self.pieces) - 1)], ends

    def last_piece(self, tokens: Tensor) -> Tensor:
        """Return the last of the ids that each token is read as."""
        return self.pieces[self.ends[tokens] - 1]

    def share(self, token_counts: Tensor) -> float:
        """Return the share of a text, of which `token_counts` `[V]` are known, that can be drafted; nan of none."""
        counts = token_counts.cpu().double()
        return float(counts[self.target_ids.cpu()].sum() / counts.sum())

    def faults(self, own_size: int) -> list[str]:
        """Return what is wrong with a map for a model of `own_size` ids, in words."""
        size, (ids, own, pieces, counts) = len(self.counts), (t.cpu() for t in self.state_dict().values())
        return [
            words
            for words, is_sound in (
                ("no token is shared", 0 < len(ids) == len(own)),
                (f"target_ids do not ascend below {size}", bool((ids.diff(prepend=ids.new_tensor([-1])) > 0).all())),
                (f"target_ids do not end below {size}", not len(ids) or int(ids[-1]) < size),
                (f"own_ids leave 0 to {own_size - 1}", bool(((own >= 0) & (own < own_size)).all())),
                ("own_ids repeat", len(own.unique()) == len(own)),
                (f"pieces leave 0 to {own_size - 1}", bool(((pieces >= 0) & (pieces < own_size)).all())),
                ("counts and pieces differ", bool((counts > 0).all()) and int(counts.sum()) == len(pieces)),
            )
            if not is_sound
        ]

    def save(self, file: Path) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.state_dict().items()}
        file.parent.mkdir(exist_ok=True)
        with replacing(file) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})

    @classmethod
    def load(cls, file: Path, own_size: int) -> VocabularyMap:
        """Return the saved map, for a draft model of `own_size` ids; raises BadInputError for one that is damaged."""
        known = {name: info for name, info in stored_tensors(file).items() if info.dtype == "I64"}
        expected = ("target_ids", "own_ids", "pieces", "counts")
        faults = [f"{name} is missing" for name in expected if len(getattr(known.get(name), "shape", ())) != 1]
        if not faults:
            tensors = load_file(file)
            found = cls(*(tensors[name] for name in expected))
            faults = found.faults(own_size)
        if faults:
            raise BadInputError(f"{file}: no map of two vocabularies ({faults[0]}). Copy it again, or train anew.")
        return found


@dataclass
class TliConfig(DraftModelConfig):
    """Settings of a draft model with a tokenizer of its own: a draft model's, and how it reads the target's text.

    Attributes:
        model: with `init: random` fields of the target's config to change; the vocabulary is the tokenizer's.
        tokenizer: the folder or Hub id of its tokenizer; None for that in `path`.
        pieces: a token that only the target has is read as the tokens of its own that spell it, the last ones, up to
            so many; 0: as its unknown token (its end token where there is none), as vLLM reads it.
        own_vocabulary, target_vocabulary: digests of both; leave them out.
        covers: the share of the training's text that can be drafted; leave it out.
    """

    words: ClassVar = {"init": ("random", "pretrained")}
    shares = ("covers",)

    tokenizer: str | None = None
    pieces: int = 4
    own_vocabulary: str = ""
    target_vocabulary: str = ""
    covers: float = 0.0


class Tli(DraftModel):
    """A draft model with a tokenizer of its own, and the map of its vocabulary.

    Args:
        tokenizer: the model's own, saved with it.
    """

    name = "tli"
    writes_text = False  # it would be text of its own vocabulary
    config_class = TliConfig
    config: TliConfig

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: VocabularyMap,
        config: TliConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(model, config or TliConfig())
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer

    @classmethod
    def build(cls, config: DraftModelConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        assert isinstance(config, TliConfig)
        theirs = target.require_tokenizer()
        place = config.tokenizer or config.path
        if place is None:
            raise BadInputError(
                f"{cls.name}: name the draft model's tokenizer (drafter.tokenizer), or a model that has one "
                "(drafter.path)."
            )
        folder = Path(target_path(place)).expanduser()
        own = load_tokenizer(folder if folder.is_dir() else model_folder(place, weights=False))
        if own is None:
            raise BadInputError(f"{cls.name}: no tokenizer at {place!r}; name the one that the draft model reads.")
        model = _model(config, own, target)
        vocabulary = VocabularyMap.of(own, theirs, target.vocab_size, config.pieces)
        config = replace(config, own_vocabulary=_digest(own), target_vocabulary=_digest(theirs))
        if token_counts is not None and not token_counts.is_meta and token_counts.any():
            config.covers = vocabulary.share(token_counts)
        drafter = cls(model, vocabulary, config, own)
        drafter._require_sound("the draft model")
        _log.info("%s", drafter.summary())
        return drafter

    @classmethod
    def from_folder(cls, folder: Path, values: Mapping[str, object], target: Target | None) -> Self:
        found = values.get(_SETTINGS)
        if not isinstance(found, dict) or found.get("schema_version") != _SCHEMA:
            raise BadInputError(
                f"{folder}: expected {_SETTINGS} of schema version {_SCHEMA} in config.json, which tells of the map of "
                f"its vocabulary, found {found!r}. Copy the folder again, or train anew."
            )
        settings = {key: value for key, value in found.items() if key != "schema_version"}
        config = TliConfig.from_dict(settings, f"{folder}: {_SETTINGS}")
        model = load_causal_lm(str(folder), dtype="auto", strict=True).eval().requires_grad_(True)
        vocabulary = VocabularyMap.load(folder / MAP, Target(model).vocab_size)
        drafter = cls(model, vocabulary, config, load_tokenizer(folder))
        drafter._require_sound(str(folder))
        if target is not None:
            _log.info("%s", drafter.summary())
        return drafter

    def save(self, path: str | Path) -> None:
        """Write a plain Hugging Face checkpoint with its tokenizer, and the map beside it."""
        self.model.config.drafter_type = self.name
        setattr(self.model.config, _SETTINGS, self._stamp())
        super().save(path)
        self.vocabulary.save(Path(path) / MAP)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(path))

    def _stamp(self) -> dict[str, object]:
        names = ("pieces", "own_vocabulary", "target_vocabulary", "covers")
        return {"schema_version": _SCHEMA, **{name: getattr(self.config, name) for name in names}}

    def identity_settings(self) -> dict[str, object]:
        values = super().identity_settings() | {_SETTINGS: self._stamp() | {"covers": None}}
        return {key: value for key, value in values.items() if key != "drafter_type"}

    def summary(self) -> str:
        """Return what can be drafted, in a sentence."""
        size, both = len(self.vocabulary.counts), len(self.vocabulary.target_ids)
        text = f", {self.config.covers:.1%} of the text that it learns from" if self.config.covers else ""
        return f"another tokenizer: {both:,} of the target's {size:,} tokens can be drafted{text}."

    def check(self, target: Target) -> None:
        size = len(self.vocabulary.counts)
        if size != target.vocab_size:
            raise IncompatibleError(
                f"this {self.name} drafter's map is of a target with {size:,} ids, the target has "
                f"{target.vocab_size:,}; train one for this target."
            )
        if not self.runner.rewinds:
            raise IncompatibleError(
                f"{self.name}: {type(self.model).__name__} has recurrent layers, whose states cannot take drafts back; "
                "take a draft model without."
            )
        made_for = self.config.target_vocabulary
        if not made_for or target.tokenizer is None:
            return
        if made_for != (found := _digest(target.tokenizer)):
            raise IncompatibleError(
                f"this {self.name} drafter's map is of a target's vocabulary with the digest {made_for[:12]}, this "
                f"target's is {found[:12]}: their ids mean other tokens. Train one for this target."
            )
        if self.tokenizer is not None and not self.vocabulary.target_ids.is_meta:  # where only sizes are planned
            self._compare_bytes(target.tokenizer)

    def _require_sound(self, what: str) -> None:
        """Refuse a map or a tokenizer that does not fit the model or its settings."""
        if faults := self.vocabulary.faults(self.runner.vocab_size):
            raise IncompatibleError(
                f"{what}: its tokenizer and its {self.runner.vocab_size:,} outputs do not fit: {faults[0]}."
            )
        if self.vocabulary.longest > max(self.config.pieces, 1):
            raise IncompatibleError(
                f"{what}: its map reads a token as {self.vocabulary.longest} pieces, its setting says at most "
                f"{self.config.pieces}. Copy the folder again, or train anew."
            )
        made_with = self.config.own_vocabulary
        if self.tokenizer is not None and made_with not in ("", found := _digest(self.tokenizer)):
            raise IncompatibleError(
                f"{what}: its map was made with a vocabulary of the digest {made_with[:12]}, the tokenizer beside it "
                f"has {found[:12]}. Copy the folder again, or train anew."
            )

    def _compare_bytes(self, theirs: PreTrainedTokenizerBase) -> None:
        """Refuse a map that joins tokens of other bytes."""
        assert self.tokenizer is not None
        own_bytes = token_bytes(self.tokenizer)
        their_bytes = token_bytes(theirs)
        for i, own in zip(self.vocabulary.target_ids.tolist(), self.vocabulary.own_ids.tolist(), strict=True):
            mine = own_bytes.get(own)
            other = their_bytes.get(i)
            if mine != other and None not in (mine, other):  # special tokens have no bytes
                raise IncompatibleError(
                    f"this {self.name} drafter's map takes the target's token {i} ({other!r}) for its own {own} "
                    f"({mine!r}). Copy the folder again, or train anew."
                )

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the divergence, on the tokens of both, at every position that predicts a supervised token."""
        own, own_ids = Target(self.model), self.vocabulary.own_ids

        def last(rows: Tensor) -> Tensor:
            ids, ends = self.vocabulary.spell(rows)
            states = own.forward(ids, logits=False).last
            return states.gather(1, (ends - 1)[:, :, None].expand(-1, -1, states.shape[2]))

        tokens, documents = batch.tokens, batch.documents
        hidden = last(tokens) if documents is None else documents.read(tokens, last)  # [B, T, H]
        parameters = list(self.model.get_output_embeddings().parameters())

        def head(states: Tensor) -> Tensor:
            return own.lm_head(states).index_select(-1, own_ids)

        return teacher_forced_loss(self, batch, hidden, head, parameters, self.config.depths)

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True)

    @property
    def output_ids(self) -> Tensor:
        return self.vocabulary.target_ids

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> TliSession:
        length = max_length * self.vocabulary.longest + spare
        # Rotary positions go on beyond those that the model was built for, and drafts become poor; a table's end.
        needed = min(max_length, target.max_context or max_length) if runs(self.model) else length
        if (limit := self.runner.max_context) is not None and limit < needed:
            raise BadInputError(
                f"the draft model was built for {limit} positions, this generation needs {needed} of its own tokens; "
                "shorten it, or train with smaller drafter.pieces."
            )
        fused = self._fused(length) if runs(self.model) else None
        return TliSession(self.vocabulary, self.runner, self.runner.new_cache(batch_size, length), fused)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return super().state_bytes(target, batch_size, max_length * self.vocabulary.longest, spare)


class TliSession(DraftModelSession):
    """A session that holds the cache of a model with its own tokenizer, and its ids that the cache lacks.

    After the root is read it is committed, as it may be several ids; drafts are one id each, and follow it.
    """

    def __init__(self, vocabulary: VocabularyMap, runner: Target, cache: RaggedCache, fused: LlamaRunner | None):
        self.vocabulary = vocabulary
        super().__init__(runner, cache, fused, vocabulary.target_ids, runner.vocab_size)

    def _start(self) -> None:
        super()._start()
        self.counts = RowLengths.of([0] * self.cache.batch_size, self.runner.device)  # of the unread ids

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        kept = counts.tensor
        if self.written:  # the root was read, and perhaps nodes after it
            tokens, kept = tokens[:, 1:], kept - 1
        places = torch.arange(tokens.shape[1], device=tokens.device)
        real = places < kept[:, None]
        if self.written and tokens.shape[1]:
            read = places < self.written - 1 if path is None else path >= 0
            # Another drafter's token may be several ids, and was read as one.
            whole = (real & read & (self.vocabulary.counts[tokens] == 1)).cumprod(1)
            if path is not None:
                self.cache.keep(path)
            self.cache.advance(RowLengths(whole.sum(1)))
            real = real & ~whole.bool()
        if tokens.shape[1]:
            ids, ends = self.vocabulary.spell(tokens, real)
            self.unread = joined(self.unread, self.counts, ids)
            self.counts = self.counts.plus(RowLengths(ends[:, -1]))
        self.written = 0

    def prefill(self, root: Tensor) -> Tensor:
        ids, ends = self.vocabulary.spell(root[:, None])
        counts = self.counts.plus(RowLengths(ends[:, -1]))
        last = self._last(joined(self.unread, self.counts, ids)[:, : max(counts.values)])
        self.cache.advance(counts)
        self._start()
        self.written, self.tree = 1, None
        at = (counts.tensor - 1)[:, None, None].expand(-1, 1, last.shape[2])
        return self._logits(last.gather(1, at))[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        last = self._last(self.vocabulary.last_piece(tokens), self.written - 1, self.grow(parents))
        self.written += tokens.shape[1]
        return self._logits(last)

    def _logits(self, last: Tensor) -> Tensor:
        """Return the logits `[B, Q, V']` of the tokens of both, from states `[B, Q, H]`."""
        return (self.fused or self.runner).lm_head(last).index_select(-1, self.vocabulary.own_ids)

    def carried(self) -> list[Tensor]:
        return [self.unread, self.counts.tensor]

    def carry(self, tensors: list[Tensor]) -> None:
        self.unread, counts = tensors
        self.counts = RowLengths(counts)


def _model(config: TliConfig, own: PreTrainedTokenizerBase, target: Target) -> PreTrainedModel:
    """Return the draft model: the one in `path`, or a new one of the tokenizer's vocabulary."""
    if config.path is not None:
        return load_causal_lm(config.path, dtype=torch.float32, strict=True).requires_grad_(True)
    roles = {role: getattr(own, role) for role in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"vocab_size": max(own.get_vocab().values()) + 1} | config.model
    model = DraftModel.build(DraftModelConfig(init="random", model=sizes), target).model
    for role, token in roles.items():
        setattr(model.config, role, token)
    return model


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary."""
    return digest_json(sorted(tokenizer.get_vocab().items()))
