"""One request to an OpenAI-compatible server, and the token ids of its answer.

Requests are completions of a prompt or chats of messages, each with token ids (`return_token_ids`: vLLM, SGLang) or in
OpenAI's own fields, with text alone. The best form that a server takes is used. Of text alone, the local tokenizer must
read the same text again. In every case the server must have read as many tokens as it was asked, or the same ones where
it returns them; any other answer is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError, http_client
from ..common.http_client import ModelList, read_answer
from ..common.terminal import visible
from ..common.untrusted_files import MEGABYTE
from ..common.values import printable_urls
from ..recipes import DataSpec
from .conversation import end_of_text, next_messages, template_answer
from .journal import Tokens
from .prompt_table import Prompt

try:
    import openai
except ImportError:  # it comes with the extra `serving`
    openai = None  # type: ignore[assignment]

# The server is at fault, or busy: another attempt may do better. Other refusals are about the question.
_PASSING = {408, 409, 425, 429}
_OUR_FAULT = {401, 402, 403}
_ABOUT_QUESTION = {400, 413, 422}
_SECONDS_TO_LIST = 10.0  # a server's models, at most: data.requests.timeout may be shorter
_LARGEST_SEED = 2**31 - 1
# An answer of ids and text, twice, with the ids of a long prompt; streamed, each token stands in a part of its own.
_BYTES_AT_LEAST, _BYTES_OF_A_TOKEN = 8 * MEGABYTE, 1024


class PassingError(Exception):
    """An attempt that failed for a reason that may pass; `unreachable`: the server could not be reached at all."""

    def __init__(self, message: str, unreachable: bool = False):
        super().__init__(message)
        self.unreachable = unreachable


class RefusedError(Exception):
    """A refusal that the server would repeat; `about_question`: it may well answer another question."""

    def __init__(self, message: str, about_question: bool = True):
        super().__init__(message)
        self.about_question = about_question


class DroppedError(Exception):
    """An answer that nothing can be learnt from, for a named reason; `about_form`: that holds for all of its form."""

    def __init__(self, reason: str, about_form: bool = False):
        super().__init__(reason)
        self.about_form = about_form


def read_key(variable: str) -> str:
    """Return the key in an environment variable, stripped; "" for none. BadInputError: no header can carry it."""
    return http_client.require_key(os.environ.get(variable, ""), f"${variable}")


@dataclass(frozen=True)
class Form:
    """A form of requests: `chat` messages, which the server renders, or the prompt itself.

    With `ids`, a prompt is token ids, ids are asked for in return, and there are fields beside OpenAI's own.
    """

    chat: bool = False
    ids: bool = False

    def __str__(self) -> str:
        if self.chat:
            return f"chat{' with token ids in return' if self.ids else ''}"
        return f"completions of {'token ids' if self.ids else 'text'}"


FORMS = (Form(ids=True), Form(chat=True, ids=True), Form(chat=True), Form())  # the best first


@dataclass(frozen=True)
class Question:
    """The next question in a conversation: the `tokens` of the whole context, and the same as a chat, if it is one."""

    prompt: Prompt
    tokens: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    seed: int


@dataclass
class Completion:
    """A server's answer.

    Attributes:
        is_text: the text is all that was written; of a chat's, servers take out thoughts and calls of tools.
        thought: the text that a server took out of a chat's answer, and sent beside it.
        tokens, asked: ids of the answer, and of the prompt as it was read; None where the server returns none.
        num_tokens, num_asked: how many there are, likewise.
        reason: why the answer ends; None for one that was cut off.
    """

    is_text: bool = True
    text: str = ""
    thought: str = ""
    tokens: Tokens | None = None
    asked: Tokens | None = None
    num_tokens: int | None = None
    num_asked: int | None = None
    reason: str | None = None

    def add(self, body: Any) -> None:
        """Add a whole response, or a streamed part. ValueError, TypeError, AttributeError: it breaks its promises."""
        if usage := getattr(body, "usage", None):
            self.num_tokens = _count(usage.completion_tokens)
            self.num_asked = _count(usage.prompt_tokens)
        self.asked = getattr(body, "prompt_token_ids", None) or self.asked
        for choice in body.choices[:1]:
            part = getattr(choice, "message", None) or getattr(choice, "delta", None)
            self.text += (getattr(choice, "text", None) if part is None else part.content) or ""
            thought = getattr(part, "reasoning_content", None) or getattr(part, "reasoning", None) or ""
            self.thought += thought if isinstance(thought, str) else ""
            self.asked = getattr(choice, "prompt_token_ids", None) or self.asked
            ids = getattr(choice, "token_ids", None)
            for token in ids or ():
                if type(token) is not int or not 0 <= token < 2**31:
                    raise ValueError(f"a token id is expected, found {token!r}")
            if ids is not None:
                self.tokens = [*(self.tokens or ()), *ids]
            self.reason = choice.finish_reason or self.reason

    def fits(self, tokens: Tokens) -> bool:
        """Return whether these are as many tokens as the server counted, with the answer's end or without it."""
        uncounted = 0 if self.num_tokens is None else self.num_tokens - len(tokens)
        return uncounted == 0 or (uncounted == 1 and self.reason != "length")


def _count(value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    raise ValueError(f"a number of tokens is expected, found {value!r}")


class Client:
    """The requests to all servers, and the tokens of their answers.

    Args:
        ending: the target's end tokens.
        with_raw: some prompts are raw text, which cannot be asked as a chat.
        num_ids: size of the target's vocabulary.
    """

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: PreTrainedTokenizerBase,
        ending: Sequence[int],
        with_raw: bool,
        num_ids: int | None = None,
    ):
        self.spec = spec
        self.tokenizer = tokenizer
        self.ending = tuple(ending)
        self.with_raw = with_raw
        self.num_ids = num_ids
        self.key = read_key(spec.requests.key)

    def connection(self, base_url: str, tries: int) -> openai.AsyncOpenAI:
        """Return the connection to a server, which tries so often again what fails for a moment."""
        num_bytes = _BYTES_AT_LEAST + _BYTES_OF_A_TOKEN * self.spec.max_new_tokens
        limited: Any = http_client.open_client(num_bytes)  # newer ones of openai's clients are typed for httpx2
        timeout = self.spec.requests.timeout
        return openai.AsyncOpenAI(
            base_url=base_url, api_key=self.key or "none", timeout=timeout, max_retries=tries, http_client=limited
        )

    def line(self, error: BaseException) -> str:
        """Return the first line of an error, written out, and without the key, which some servers repeat."""
        message = http_client.without_key(str(error), self.key)
        return visible((message.strip() or type(error).__name__).splitlines()[0][:200])

    def forms(self, prompt: Prompt) -> list[Form]:
        """Return the forms in which the prompts can be asked, the best first; `prompt` is one of them."""
        interface, sampling = self.spec.requests.interface, self.spec.sampling
        needs_more = sampling.top_k is not None or bool(sampling.min_p) or sampling.repetition_penalty != 1
        return [
            form
            for form in FORMS
            if (interface == "auto" or form.chat == (interface == "chat"))
            and not (form.chat and self.with_raw)
            and (form.ids or not (needs_more or (form.chat and prompt.template)))
        ]

    def question(self, index: int, prompt: Prompt, turns: Sequence[Tokens], tokens: tuple[int, ...]) -> Question:
        """Return the question after the answers `turns`; its context is `tokens`."""
        seed = (self.spec.sampling.seed * 1_000_003 + index * 1_009 + len(turns)) % _LARGEST_SEED
        return Question(prompt, tokens, next_messages(prompt, turns, self.tokenizer), seed)

    async def first_model(self, api: openai.AsyncOpenAI) -> str:
        """Return the first model that a server lists; raises as `complete`."""
        async with self._understood(min(_SECONDS_TO_LIST, self.spec.requests.timeout), is_first=True):
            answer = await api.with_options(max_retries=0).models.with_raw_response.list()
            return read_answer(ModelList, answer.content, f"{api.base_url}models", self.key).data[0].id

    async def complete(self, api: openai.AsyncOpenAI, model: str, form: Form, question: Question) -> Completion:
        """Return the answer to one request, which `api` tries again after short faults.

        Raises:
            PassingError: the server failed, was too slow, or broke off. RefusedError: it does not take the question.
            DroppedError: the question cannot be asked. BadInputError: it does not take us.
        """
        interface: Any = api.chat.completions if form.chat else api.completions
        body = self._body(model, form, question)
        completion = Completion(is_text=not form.chat)
        # The client's own limit is for each part of a reply: one that drips would never end.
        async with self._understood(self.spec.requests.timeout):
            reply = await interface.create(**body)
            if self.spec.requests.stream:
                async for part in reply:
                    completion.add(part)
            else:
                completion.add(reply)
            (completion.text + completion.thought).encode()  # half of a pair of surrogates is no text
        if completion.reason is None:
            raise PassingError("an answer that was broken off")
        if http_client.repeats(completion.text + completion.thought, self.key):
            raise PassingError("an answer that repeats the key")
        return completion

    @asynccontextmanager
    async def _understood(self, seconds: float, is_first: bool = False) -> AsyncIterator[None]:
        """Turn whatever goes wrong inside, or takes longer, into the errors of `complete`.

        `is_first`: a failure without an HTTP status means that no server is there.
        """
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise PassingError(f"no answer within {seconds:g} s", is_first) from None
        except openai.APIStatusError as error:
            raise self._of_status(error) from None
        except openai.APIConnectionError as error:
            unreachable = is_first or type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")
            raise PassingError(self.line(error.__cause__ or error), unreachable) from None
        except (openai.APIError, ValueError, TypeError, AttributeError) as error:  # not what the interface promises
            raise PassingError(f"an answer that cannot be read ({self.line(error)})", is_first) from None
        except Exception as error:  # a stream that breaks off raises what the library of the connection raises
            raise PassingError(self.line(error), is_first) from None

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
        if form.ids:  # fields of vLLM and its like, which undo the target's own defaults
            more = {"return_token_ids": True, "top_k": sampling.top_k or -1, "min_p": sampling.min_p or 0.0}
            more |= {"repetition_penalty": sampling.repetition_penalty}
            template = {"chat_template_kwargs": dict(question.prompt.template)}
            body["extra_body"] = more | (template if form.chat and question.prompt.template else {})
        return body

    def _text(self, tokens: tuple[int, ...]) -> str:
        """Return the text that the tokenizer, with the tokens that it puts around any text, reads as these tokens."""
        plain = list(tokens)
        for left in (plain, plain[1:] if plain[0] in self.tokenizer.all_special_ids else plain):
            text = str(self.tokenizer.decode(left, clean_up_tokenization_spaces=False))
            if list(self.tokenizer(text)["input_ids"]) == plain:
                return text
        raise DroppedError("unwritable_prompt", about_form=True)

    def _of_status(self, error: openai.APIStatusError) -> Exception:
        where, message = error.request.url, f"HTTP {error.status_code}, {self.line(error)}"
        if error.status_code in _OUR_FAULT:
            variable = self.spec.requests.key
            about_key = f"The key is read from ${variable}, which is {'set' if self.key else 'not set'}."
            return BadInputError(f"{where} refuses us: {message} {about_key}")
        if error.response.has_redirect_location:
            to = printable_urls(http_client.without_key(error.response.headers["location"], self.key)[:4000])[:200]
            return BadInputError(f"{where} redirects to {to!a}, which is not followed; give the URL itself.")
        if error.status_code in _PASSING or error.status_code >= 500:
            return PassingError(message)
        return RefusedError(message, error.status_code in _ABOUT_QUESTION)

    def tokens(self, completion: Completion, question: Question, form: Form) -> Tokens:
        """Return an answer's tokens, with the end token where the target ended it. DroppedError: they are uncertain."""
        read, num_read = completion.asked, completion.num_asked
        context = list(question.tokens)
        if (read is not None and read != context) or num_read not in (None, len(context)):
            raise DroppedError("other_prompt", about_form=True)  # the server rendered or read something else
        own = completion.tokens
        prompt_uncounted = read is None and num_read is None
        answer_uncounted = own is None and completion.num_tokens is None
        # Then it would not show whether text is read as it was written.
        if (prompt_uncounted or answer_uncounted) and (form.chat or not form.ids):
            raise DroppedError("uncounted", about_form=True)
        # A tool's call ends as any other answer does, but its text is in other fields.
        if completion.reason not in ("stop", "length") and (completion.reason != "tool_calls" or own is None):
            raise DroppedError("unfinished")
        tokens = self._read_again(completion, question) if own is None else list(own)
        self._check(tokens, completion, question)
        # The end token is counted by some servers, and never in the text; returned ids are all that are counted.
        is_ended = bool(tokens) and tokens[-1] in self.ending
        is_cut = completion.reason == "length" or len(tokens) >= self.spec.max_new_tokens
        is_whole = own is not None and completion.num_tokens in (None, len(tokens))
        return tokens if is_ended or is_cut or is_whole else [*tokens, *self._template_answer(completion, question)[1]]

    def _check(self, tokens: Tokens, completion: Completion, question: Question) -> None:
        """Raise DroppedError for tokens that are no answer to what was asked."""
        if self.num_ids is not None and any(token >= self.num_ids for token in tokens):
            raise DroppedError("foreign_tokens", about_form=True)  # the server has another vocabulary
        if len(tokens) > self.spec.max_new_tokens:
            raise DroppedError("too_long", about_form=True)
        begins_with_prompt = tokens[: len(question.tokens)] == list(question.tokens)
        # Raw text may well go on with itself, and then its tokens are counted.
        if begins_with_prompt and (question.messages is not None or completion.num_tokens != len(tokens)):
            raise DroppedError("repeated_prompt", about_form=True)
        if any(token in self.ending for token in tokens[:-1]):
            raise DroppedError("after_end")
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        # The text that came with ids is read in them by the local tokenizer, too.
        is_read = completion.tokens is None or not completion.is_text or _bare(completion.text) == _bare(text)
        if not is_read or not completion.fits(tokens):
            raise DroppedError("other_tokens")

    def _read_again(self, completion: Completion, question: Question) -> Tokens:
        """Return the tokens that the text has after its prompt, without its end.

        Where a server takes thoughts and names of channels out of a chat's answer, the template writes them.
        """
        context = list(question.tokens)
        before = str(self.tokenizer.decode(context, clean_up_tokenization_spaces=False))
        tokens = list(self.tokenizer(before + completion.text, add_special_tokens=False)["input_ids"])
        if tokens[: len(context)] == context:
            tokens = tokens[len(context) :]
        else:
            tokens = list(self.tokenizer(completion.text, add_special_tokens=False)["input_ids"])
        text = str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        if text != completion.text and text.lstrip(" ") != completion.text:
            raise DroppedError("unreadable_text")
        if completion.fits(tokens):
            return tokens
        written = [] if completion.is_text else self._template_answer(completion, question)[0]
        if not written or not completion.fits(written):
            raise DroppedError("other_tokens")
        return written

    def _template_answer(self, completion: Completion, question: Question) -> tuple[Tokens, Tokens]:
        """Return the answer's tokens as the chat template writes them, and its end token, if that is known."""
        if question.messages is None:
            return [], end_of_text(self.ending)
        thought = dict.fromkeys(("reasoning_content", "thinking"), completion.thought) if completion.thought else {}
        answer = {"role": "assistant", "content": completion.text, **thought}
        return template_answer(question.prompt, question.messages, answer, self.tokenizer, self.ending)


def _bare(text: str) -> str:
    """Return a text without what servers add or take away at its edges: spaces, and half of a character."""
    return text.strip().rstrip("\ufffd").strip()
