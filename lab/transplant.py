"""A draft model with the target's tokenizer in place of its own: vocabularies that differ, joined by bytes.

A token that stands for the same bytes in both keeps its rows of the embeddings. Any other gets the mean of the rows of
the model's own tokens that spell it. What comes out is a plain draft model of the target's ids: verification, training,
pairs and exports need no map. (TLI, arXiv 2502.05202, keeps the model and drafts the shared tokens alone.)

Shapes: V the target's vocabulary, P pieces of all its tokens, H hidden size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..common.errors import IncompatibleError
from ..targets import Target

_BYTES: Final = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = "\u2581"  # SentencePiece's
_ROLES = ("unk_token_id", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class TokenPieces:
    """The model's own tokens that spell each of the target's.

    Attributes:
        pieces: of each id of the target, its own ids; empty where nothing is known of the bytes.
        shared: ids of the target that are one token in both.
    """

    pieces: list[list[int]]
    shared: list[int]

    def mean_rows(self, weight: Tensor) -> Tensor:
        """Return the rows `[V, ...]` of the target's ids: means over their pieces, or over all where there are none."""
        table = weight.reshape(len(weight), -1).float()
        lengths = torch.tensor([len(each) for each in self.pieces])
        flat = torch.tensor([piece for each in self.pieces for piece in each])
        starts = lengths.cumsum(0) - lengths
        rows = nn.functional.embedding_bag(flat, table, starts, mode="mean")
        rows[lengths == 0] = table.mean(0)
        return rows.reshape(-1, *weight.shape[1:]).to(weight.dtype)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes that each token stands for, in the order of ids; special tokens are left out.

    Raises IncompatibleError for a tokenizer without a fast form, whose decoder is not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise IncompatibleError("the bytes of tokens are known for fast tokenizers alone (a tokenizer.json).")
    byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])
    added = tokenizer.added_tokens_decoder
    found: dict[int, bytes] = {}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if i in added:  # its text stands as it is
            if not added[i].special:
                found[i] = added[i].content.encode()
        else:
            found[i] = _from_byte_level(token) if byte_level else _from_pieces(token)
    return found


def _from_byte_level(token: str) -> bytes:
    return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token)


def _from_pieces(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: `<0x0A>` is one byte."""
    if _is_byte(token):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE, " ").encode()


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _by_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """Return the id of each spelling: of a letter and its byte token, `<0x61>`, the letter's, which was trained."""
    spelled = token_bytes(tokenizer)
    names = cast("list[str]", tokenizer.convert_ids_to_tokens(list(spelled)))
    bytes_last = sorted(zip(names, spelled, strict=True), key=lambda entry: (_is_byte(entry[0]), entry[1]))
    found: dict[bytes, int] = {}
    for _, i in bytes_last:
        found.setdefault(spelled[i], i)
    return found


def token_pieces(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, size: int) -> TokenPieces:
    """Return how the tokens of `theirs` are spelled in those of `own`, for `size` ids.

    A special token is shared if both have it by name, or in the same role: it begins or ends a text.

    Raises IncompatibleError if `theirs` has ids beyond `size`.
    """
    known = _by_bytes(own)
    longest = max(map(len, known))
    spelled = token_bytes(theirs)
    special = _special(own, theirs)
    if (highest := max([*spelled, *special])) >= size:
        raise IncompatibleError(f"the target's tokenizer has ids up to {highest:,}, and the target {size:,} outputs.")
    pieces: list[list[int]] = [[] for _ in range(size)]
    for i, text in spelled.items():
        pieces[i] = _spelled(text, known, longest)
    for i, same in special.items():
        pieces[i] = [same]
    whole = {i for i, text in spelled.items() if text in known}
    return TokenPieces(pieces, sorted(whole | special.keys()))


def _special(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> dict[int, int]:
    """Return special tokens of `theirs` that `own` has, too: its id by theirs."""
    roles = [(getattr(theirs, role, None), getattr(own, role, None)) for role in _ROLES]
    # The end comes last: where a token both begins and ends texts, a drafter must be able to end.
    found = {one: other for one, other in roles if one is not None and other is not None}
    vocabulary = own.get_vocab()
    return found | {i: vocabulary[token] for token, i in theirs.get_added_vocab().items() if token in vocabulary}


def _spelled(text: bytes, known: dict[bytes, int], longest: int) -> list[int]:
    """Return the longest known tokens, one after the other; bytes that no token begins with are passed over."""
    found: list[int] = []
    begin = 0
    while begin < len(text):
        ends = range(min(len(text), begin + longest), begin, -1)
        end = next((end for end in ends if text[begin:end] in known), None)
        if end is not None:
            found.append(known[text[begin:end]])
        begin = end or begin + 1
    return found


@torch.no_grad()
def transplant(model: PreTrainedModel, own: PreTrainedTokenizerBase, target: Target) -> tuple[PreTrainedModel, int]:
    """Return `model` with embeddings for the target's ids, changed in place, and how many tokens both share."""
    theirs = target.require_tokenizer()
    found = token_pieces(own, theirs, target.vocab_size)
    if not found.shared:
        raise IncompatibleError("the two vocabularies share no token: the draft model would know none of the target's.")
    inputs = cast(nn.Embedding, model.get_input_embeddings())
    outputs = cast(nn.Linear, model.get_output_embeddings())
    tied = outputs.weight is inputs.weight
    read = found.mean_rows(inputs.weight)
    written = None if tied else found.mean_rows(outputs.weight)
    bias = None if outputs.bias is None else found.mean_rows(outputs.bias)
    model.resize_token_embeddings(target.vocab_size, mean_resizing=False)
    cast(nn.Embedding, model.get_input_embeddings()).weight.copy_(read)
    resized = cast(nn.Linear, model.get_output_embeddings())
    if written is not None:
        resized.weight.copy_(written)
    if bias is not None:
        resized.bias.copy_(bias)
    for settings in (model.config, model.generation_config):
        for role in _ROLES[1:]:
            setattr(settings, role, getattr(target.config, role, None))
    return model, len(found.shared)
