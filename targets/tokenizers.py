"""Loading and comparing tokenizers: drafter and target exchange token ids, so each must mean the same to both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..common.errors import BadInputError, IncompatibleError, OutriderError
from .model_folder import check_files
from .tokenizer_process import open_tokenizer, try_tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class TokenDifference:
    """The lowest id that two vocabularies disagree about, and each one's token; None where it has no such id."""

    id: int
    first: str | None
    second: str | None


def first_difference(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> TokenDifference | None:
    """Return the lowest id at which two vocabularies (added tokens included) differ; None if they agree."""
    one, two = _by_id(first), _by_id(second)
    lowest = min((i for i in one.keys() | two.keys() if one.get(i) != two.get(i)), default=None)
    return None if lowest is None else TokenDifference(lowest, one.get(lowest), two.get(lowest))


def require_same_vocabulary(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, what: str) -> None:
    """Raise IncompatibleError if the vocabulary of `what`, of the tokenizer `own`, differs from the target's."""
    difference = first_difference(own, theirs)
    if difference is not None:
        one, other = ("missing" if t is None else repr(t) for t in (difference.first, difference.second))
        raise IncompatibleError(
            f"{what} and the target have different vocabularies: id {difference.id} is {one} in {what} and {other} in "
            "the target. They must share one tokenizer; use a drafter made for this target, or train one."
        )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer saved in `folder`, None if there is none; raises BadInputError if it cannot be read."""
    if not any((folder / name).exists() for name in _FILES):
        return None
    check_files(folder)
    try:
        return tokenizer_of(folder)
    except OutriderError:
        raise
    except Exception as error:
        raise BadInputError(f"the tokenizer in {str(folder)!r} cannot be loaded: {error}") from error


def tokenizer_of(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder whose files were checked, after it was tried in a process of its own.

    Raises the library's errors, IncompatibleError, and BadInputError if reading or writing takes too much.
    """
    if not trust_remote_code and folder.is_dir():
        try_tokenizer(folder)
    return open_tokenizer(folder, trust_remote_code)


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token for token, i in sorted(tokenizer.get_vocab().items())}


# Prompt tokens decoded along with the new ones: a first token's leading space shows only after another token.
CONTEXT = 8
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of tokens as they come.

    A token may be a part of a character (byte-level BPE) and may look different after another one (leading spaces), so
    everything is decoded again and only what was added is given out. Bytes that are not a character yet wait.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int]):
        self.tokenizer = tokenizer
        self.tokens = list(prompt[-CONTEXT:])
        self.shown = len(self._decode())

    def _decode(self) -> str:
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is unfinished."""
        self.tokens.append(token)
        return self._advance(self._decode().rstrip(REPLACEMENT))

    def flush(self) -> str:
        """Return what was held back, at the end."""
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new
