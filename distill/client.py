"""One question to an OpenAI-compatible server, and the token ids of its answer.

Servers differ in what they take and in what they return. The best way is tried first: prompts as token ids, and ids
asked for in return (vLLM's `return_token_ids`). Where a server returns text only, it is read again by the local
tokenizer, and an answer whose text does not survive that is dropped. In every case the server must have read as many
tokens as it was asked, or the same ones where it says which.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..recipes import DataSpec
from .conversation import next_messages
from .table import Prompt

try:
    import openai
except ImportError:  # it comes with the extra `serving`
    openai = None  # type: ignore[assignment]

Tokens = list[int]

# The server is at fault, or busy: another attempt may do better. Other refusals are about the question.
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
_OUR_FAULT = {401, 402, 403}
_ABOUT_QUESTION = {400, 413, 422}
_LARGEST_SEED = 2**31 - 1
_LONGEST_AFTER = 300.0


class PassingError(Exception):
    """An attempt that failed for a reason that may pass.

    Attributes:
        unreachable: the server could not be reached at all.
        after: seconds that the server wants to be left alone.
    """

    def __init__(self, message: str, unreachable: bool = False, after: float = 0.0):
        super().__init__(message)
        self.unreachable, self.after = unreachable, after


class RefusedError(Exception):
    """The server refuses to be asked like this, and would again.

    Attributes:
        about_question: it may well answer another one.
    """

    def __init__(self, message: str, about_question: bool = True):
        super().__init__(message)
        self.about_question = about_question


class DroppedError(Exception):
    """An answer that nothing can be learnt from; the message is the name of the reason.

    Attributes:
        about_form: all answers to questions that are asked in this way would be dropped.
    """

    def __init__(self, reason: str, about_form: bool = False):
        super().__init__(reason)
        self.about_form = about_form


def require_client() -> None:
    """Raise BadInputError if the client of servers is not installed."""
    if openai is None:
        raise BadInputError("data.servers needs the package openai; install it with `pip install 'outrider[serving]'`.")


def read_key(variable: str) -> str:
    """Return the servers' key that an environment variable holds, without white space around it; "" for none.

    Raises:
        BadInputError: no header can carry it. The message does not repeat it.
    """
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable():
        raise BadInputError(
            f"${variable} holds a key with line breaks, control characters or letters outside ASCII, which no request "
            "can carry. Set it to the key alone."
        )
    return key


@dataclass(frozen=True)
class Form:
    """A way to ask.

    Attributes:
        chat: by messages, which the server renders; else by the prompt itself.
        ids: the prompt is token ids; else text.
        more: with fields that OpenAI's own interface does not have.
    """

    chat: bool = False
    ids: bool = False
    more: bool = False

    def __str__(self) -> str:
        way = "chat" if self.chat else f"completions of {'token ids' if self.ids else 'text'}"
        return f"{way}{' with token ids in return' if self.more else ''}"


FORMS = (
    Form(ids=True, more=True),
    Form(ids=True),
    Form(chat=True, more=True),
    Form(more=True),
    Form(chat=True),
    Form(),
)


@dataclass(frozen=True)
class Question:
    """What is asked next in a conversation.

    Attributes:
        tokens: of the whole context. messages: the same as a chat; None for raw text.
        seed: of the draws.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    seed: int

    @classmethod
    def of(cls, index: int, prompt: Prompt, turns: Sequence[Tokens], tokens: tuple[int, ...], asker: Asker) -> Question:
        """Return the question after the answers `turns`."""
        seed = (asker.spec.sampling.seed * 1_000_003 + index * 1_009 + len(turns)) % _LARGEST_SEED
        return cls(prompt, tokens, next_messages(prompt, turns, asker.tokenizer), seed)


@dataclass
class Completion:
    """What a server answered.

    Attributes:
        tokens, asked: ids of the answer, and of the prompt as it was read; None where the server does not tell.
        num_tokens, num_asked: how many there are, likewise.
        reason: why the answer ends; None for one that was cut off.
        is_text: the text is all that was written; of a chat's, servers take out thoughts and calls of tools.
    """

    text: str = ""
    tokens: Tokens | None = None
    asked: Tokens | None = None
    num_tokens: int | None = None
    num_asked: int | None = None
    reason: str | None = None
    is_text: bool = True

    def add(self, body: Any) -> None:
        """Add a whole response, or a part of one that is streamed.

        Raises:
            ValueError, TypeError, AttributeError: it is not what the interface says; nothing of a reply is checked
                before this.
        """
        if usage := getattr(body, "usage", None):
            self.num_tokens, self.num_asked = _count(usage.completion_tokens), _count(usage.prompt_tokens)
        self.asked = getattr(body, "prompt_token_ids", None) or self.asked
        for choice in body.choices[:1]:
            part = getattr(choice, "message", None) or getattr(choice, "delta", None)
            self.text += (getattr(choice, "text", None) if part is None else part.content) or ""
            self.asked = getattr(choice, "prompt_token_ids", None) or self.asked
            if (ids := getattr(choice, "token_ids", None)) is not None:
                self.tokens = [*(self.tokens or ()), *map(_id, ids)]
            self.reason = choice.finish_reason or self.reason


class Asker:
    """A way to ask all servers: how requests are made, and how answers become tokens.

    Args:
        ending: the target's end tokens.
        with_raw: some prompts are raw text, which nobody can ask as a chat.
        num_ids: size of the target's vocabulary; None takes any id.
    """

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: PreTrainedTokenizerBase,
        ending: Sequence[int],
        with_raw: bool,
        num_ids: int | None = None,
    ):
        self.num_ids = num_ids
        self.spec, self.tokenizer, self.ending, self.with_raw = spec, tokenizer, tuple(ending), with_raw
        self.special = set(tokenizer.all_special_ids)
        self.key = read_key(spec.requests.key)

    def plain(self, message: str) -> str:
        """Return a message without the key, which some servers repeat."""
        return message.replace(self.key, "…") if self.key else message

    def line(self, error: BaseException) -> str:
        """Return the first line of an error, without the key; it is taken out first, for half of it would stay."""
        return (self.plain(str(error)).strip() or type(error).__name__).splitlines()[0][:200]

    def forms(self, prompt: Prompt) -> list[Form]:
        """Return the ways in which a server may be asked, the best first, by one of the prompts."""
        interface, sampling = self.spec.requests.interface, self.spec.sampling
        needs_more = sampling.top_k is not None or bool(sampling.min_p) or sampling.repetition_penalty != 1
        return [
            form
            for form in FORMS
            if (interface == "auto" or form.chat == (interface == "chat"))
            and not (form.chat and self.with_raw)
            and not (needs_more and not form.more)
            and not (prompt.template and form.chat and not form.more)
        ]

    async def ask(self, client: openai.AsyncOpenAI, model: str, form: Form, question: Question) -> Completion:
        """Ask once.

        Raises:
            PassingError: the server failed, was too slow, or broke off. RefusedError: it does not take the question.
            BadInputError: it does not take us.
        """
        interface = client.chat.completions if form.chat else client.completions
        said = Completion(is_text=not form.chat)
        try:
            async with asyncio.timeout(self.spec.requests.timeout):
                answer = await interface.create(**self._body(model, form, question))
                if self.spec.requests.stream:
                    async for part in answer:
                        said.add(part)
                else:
                    said.add(answer)
            said.text.encode()  # half of a pair of surrogates is no text
        except TimeoutError:
            raise PassingError(f"no answer within {self.spec.requests.timeout:g} s") from None
        except openai.APIStatusError as error:
            raise self._of_status(error) from None
        except openai.APIConnectionError as error:
            raise PassingError(self.line(error.__cause__ or error), unreachable=_is_unreachable(error)) from None
        except (openai.APIError, ValueError, TypeError, AttributeError) as error:  # not what the interface says
            raise PassingError(f"an answer that cannot be read ({self.line(error)})") from None
        except Exception as error:  # a stream that breaks off raises what the library of the connection raises
            raise PassingError(self.line(error)) from None
        if said.reason is None:
            raise PassingError("an answer that was broken off")
        return said

    def _body(self, model: str, form: Form, question: Question) -> dict[str, Any]:
        sampling = self.spec.sampling
        body: dict[str, Any] = {"model": model, "max_tokens": self.spec.max_new_tokens}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
        body |= {"seed": question.seed} if sampling.temperature else {}
        if form.chat:
            body["messages"] = list(question.messages or ())
            body |= {"tools": question.prompt.tools} if question.prompt.tools else {}
        else:
            body["prompt"] = list(question.tokens) if form.ids else self._text(question.tokens)
        if self.spec.requests.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | ({"extra_body": self._more(form, question)} if form.more else {})

    def _more(self, form: Form, question: Question) -> dict[str, Any]:
        """Return fields that vLLM and its like know; they undo what the target's own defaults say."""
        sampling = self.spec.sampling
        more = {"return_token_ids": True, "top_k": sampling.top_k or -1, "min_p": sampling.min_p or 0.0}
        more["repetition_penalty"] = sampling.repetition_penalty
        template = {"chat_template_kwargs": dict(question.prompt.template)}
        return more | (template if form.chat and question.prompt.template else {})

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text that the tokenizer, with what it puts around any text, reads as these tokens.

        Raises:
            DroppedError: there is none.
        """
        plain = list(tokens)
        for left in (plain, plain[1:] if plain[0] in self.special else plain):
            text = str(self.tokenizer.decode(left, clean_up_tokenization_spaces=False))
            if list(self.tokenizer(text)["input_ids"]) == plain:
                return text
        raise DroppedError("unwritable_prompt", about_form=True)

    def _of_status(self, error: openai.APIStatusError) -> Exception:
        said = f"HTTP {error.status_code}, {self.line(error)}"
        if error.status_code in _OUR_FAULT:
            return BadInputError(f"the server refuses us: {said}")
        if error.status_code in _PASSING or error.status_code >= 500:
            return PassingError(said, after=_after(error))
        return RefusedError(said, error.status_code in _ABOUT_QUESTION)

    # ------------------------------------------------------------ what was said

    def tokens(self, said: Completion, question: Question, form: Form) -> Tokens:
        """Return the tokens of an answer, with its end token where the target ended it.

        Raises:
            DroppedError: they cannot be told for certain.
        """
        read = list(question.tokens)
        if (said.asked is not None and said.asked != read) or said.num_asked not in (None, len(read)):
            raise DroppedError("other_prompt", about_form=True)  # the server rendered or read something else
        uncounted = (said.asked, said.num_asked) == (None, None) or (said.tokens, said.num_tokens) == (None, None)
        if uncounted and not form.ids:
            raise DroppedError("uncounted", about_form=True)  # nobody can tell whether text is read as it was written
        # A tool's call ends as any other answer does, but its text is in other fields.
        if said.reason not in ("stop", "length") and (said.reason, said.tokens is None) != ("tool_calls", False):
            raise DroppedError("unfinished")
        found = self._read_again(said, read) if said.tokens is None else self._as_said(said)
        if said.reason != "length" and self.ending and (not found or found[-1] not in self.ending):
            found = [*found, self._end()]
        return found

    def _as_said(self, said: Completion) -> Tokens:
        """Return the server's own ids, if the local tokenizer reads the text in them that came with them."""
        found = list(said.tokens or ())
        if self.num_ids is not None and any(token >= self.num_ids for token in found):
            raise DroppedError("foreign_tokens", about_form=True)  # the server has another vocabulary
        text = self.tokenizer.decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if said.is_text and _bare(said.text) != _bare(str(text)):
            raise DroppedError("other_tokens")
        return found

    def _read_again(self, said: Completion, read: Tokens) -> Tokens:
        """Return the tokens that the text has after its prompt."""
        before = str(self.tokenizer.decode(read, clean_up_tokenization_spaces=False))
        whole = list(self.tokenizer(before + said.text, add_special_tokens=False)["input_ids"])
        found = whole[len(read) :] if whole[: len(read)] == read else self._alone(said.text)
        text = str(self.tokenizer.decode(found, clean_up_tokenization_spaces=False))
        if text != said.text and text.lstrip(" ") != said.text:
            raise DroppedError("unreadable_text")
        # The end token is counted by some servers, and never in the text.
        if said.num_tokens is not None and said.num_tokens - len(found) not in (0, 1):
            raise DroppedError("other_tokens")
        return found

    def _alone(self, text: str) -> Tokens:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end(self) -> int:
        own = self.tokenizer.eos_token_id
        return int(own) if own in self.ending else self.ending[0]


def _bare(text: str) -> str:
    """Return a text without what servers add or take away at its edges: spaces, and half of a character."""
    return text.strip().rstrip("\ufffd").strip()


def _id(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"a token id is expected, found {value!r}")
    return value


def _count(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"a number of tokens is expected, found {value!r}")


def _after(error: openai.APIStatusError) -> float:
    """Return the seconds that a busy server asks for, up to some minutes: it may recover earlier than it thinks."""
    try:
        return min(_LONGEST_AFTER, max(0.0, float(error.response.headers.get("retry-after", 0))))
    except ValueError:  # a date
        return 0.0


def _is_unreachable(error: BaseException) -> bool:
    """Tell whether no connection came about at all."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in ("ConnectError", "ConnectTimeout") or isinstance(seen, ConnectionRefusedError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
