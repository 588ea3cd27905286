"""Do two tokenizers speak of the same tokens? Drafter and target exchange ids, so every id must mean the same to both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ground.errors import BadInputError, IncompatibleError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class TokenDifference:
    """The lowest id that two vocabularies disagree about.

    Attributes:
        first, second: what each vocabulary calls it; None where it has no such id.
    """

    id: int
    first: str | None
    second: str | None

    def describe(self, first: str, second: str) -> str:
        """As `id 17 is 'foo' in <first> and 'bar' in <second>`."""
        return f"id {self.id} is {_shown(self.first)} in {first} and {_shown(self.second)} in {second}"


def first_difference(first: Any, second: Any) -> TokenDifference | None:
    """The lowest token id at which two tokenizers' vocabularies (added tokens included) differ; None if they agree."""
    one, two = _by_id(first), _by_id(second)
    differing = [i for i in one.keys() | two.keys() if one.get(i) != two.get(i)]
    if not differing:
        return None
    lowest = min(differing)
    return TokenDifference(lowest, one.get(lowest), two.get(lowest))


def require_same_vocabulary(own: Any, theirs: Any, what: str) -> None:
    """Raise IncompatibleError, naming the first differing token, unless `own` (of `what`) and the target's tokenizer agree."""
    found = first_difference(own, theirs)
    if found is not None:
        raise IncompatibleError(
            f"{what} and the target have different vocabularies: {found.describe(what, 'the target')}. "
            "They must share one tokenizer; use a drafter made for this target, or train one."
        )


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer saved in `folder`, or None if there is none.

    Raises:
        BadInputError: its files cannot be read.
    """
    if not any((folder / name).exists() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise BadInputError(f"the tokenizer in {str(folder)!r} cannot be loaded: {error}") from error


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in sorted(tokenizer.get_vocab().items())}


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
