"""Loading, comparing and using tokenizers: drafter and target exchange token ids, which must mean the same to both.

Chat and response templates are a stranger's programs too: the library runs them in a sandbox.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..common.errors import BadInputError, IncompatibleError, OutriderError, is_panic
from .model_folder import check_files, without_questions

_MARKERS = re.compile(r"\{%-?\s*generation\b")
_SAMPLE = (  # one of everything that texts consist of
    f"{string.printable}1,234.5 €\r\n\tÜñï e\u0301 漢字 かな עברית العربية 👩\u200d👩\u200d👧 \u200b\x00\ufffd"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)
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
    """Return the tokenizer in a folder whose files were checked; raises the library's errors, and IncompatibleError."""
    try:
        with without_questions():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise IncompatibleError(f"{type(tokenizer).__name__} is no tokenizer of one language model.")
        if not trust_remote_code:
            _require_usable(tokenizer)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(f"the library breaks off ({error})") from error
    return tokenizer


def _require_usable(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise an error if short texts cannot be read or written, or get an id that no table of tokens has."""
    ids = [*tokenizer(_SAMPLE)["input_ids"], *tokenizer("a word")["input_ids"]]
    if odd := [token for token in ids if not 0 <= token < 2**31]:
        raise ValueError(f"a token has the id {odd[0]}")
    tokenizer.decode(ids)


class Rendered(NamedTuple):
    """A chat as text, and the spans of characters inside the template's `{% generation %}` markers, if it has any."""

    text: str
    generated: Sequence[Sequence[int]]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    answer: bool,
    arguments: Mapping[str, Any],
) -> Rendered:
    """Return a chat rendered by the tokenizer's template; raises what the template does."""
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        own: Any = list(messages)
        text: Any = tokenizer.apply_chat_template(
            own, tools=tools, tokenize=False, add_generation_prompt=answer, **arguments
        )
        return Rendered(str(text), ())
    if not messages:
        raise ValueError("there is no message")
    template = tokenizer.get_chat_template(None, tools)
    known: Any = [{name: value for name, value in message.items() if value is not None} for message in messages]
    marked = _MARKERS.search(template) is not None
    more: dict[str, Any] = {**tokenizer.special_tokens_map, **arguments, "add_generation_prompt": answer}
    rendered: Any = render_jinja_template(
        [known], tools, chat_template=template, return_assistant_tokens_mask=marked, **more
    )
    texts, spans = rendered
    texts[0].encode()  # half of a pair of surrogates is no text
    return Rendered(str(texts[0]), spans[0] if marked else ())


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
