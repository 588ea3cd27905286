"""The expectation of a pair in any engine: the text and acceptance of our own decoder on the same prompts.

It is JSON, so that it can be made where the target runs in Outrider and compared where the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, ValidationError, model_validator
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.errors import Refusal, first_line
from ..common.progress import Advance, progress
from ..common.untrusted_files import MEGABYTE, RECORD, parse_json, read_text
from ..common.values import ForeignModel
from ..decode import Decoder, Plan, Round, Sampling
from ..distill.conversation import render
from ..distill.prompt_table import Prompt
from ..eval.suites import Suite
from ..heads import Drafter, DraftModel, Ngram, NgramConfig
from ..heads.lookup.ngram import NgramSession
from ..targets import RaggedCache, RowLengths, Target
from .engine import SentText, TokenId
from .engine_metrics import DraftCounts

BATCH = 16  # prompts that our decoder answers at once
_LIMITS = replace(RECORD, num_bytes=64 * MEGABYTE)
LONGEST_TEXT = 50_000  # letters of a suite that are compared as tokens
MOST_WORDS = 10_000  # of the vocabulary, that are compared as tokens


class ServedPrompt(ForeignModel, extra="forbid"):
    """One prompt. `tokens` are the ids that it is sent as."""

    suite: str
    id: str
    tokens: list[TokenId] = Field(min_length=1)


class ServedAnswer(ForeignModel, extra="forbid"):
    """Our decoder's answer to one prompt at one temperature.

    Attributes:
        tokens: the text of the first seed. ended: whether the target ended it, not the length.
        lengths: new tokens, of every seed. counts: of every seed.
    """

    tokens: list[TokenId]
    ended: bool
    lengths: list[Annotated[int, Field(ge=0)]]
    counts: list[DraftCounts]


class Expectation(ForeignModel, extra="forbid"):
    """Our decoder's answers to some prompts, temperature by temperature.

    Attributes:
        target: the digest of the target's content. drafter: the drafter's type. drafter_digest: of its files.
        precision: that its matrices were rounded to, as in the export; "" for their own.
        suites, limit, seeds_above_0, first_seed, habits: see `Trial`.
        texts: of the suites, to be compared as tokens; [] where the target has no tokenizer.
        answers: by temperature (as text, for JSON), in the order of the prompts.
        one_hot: the same with the most probable drafts proposed instead of drawn ones; engines differ in that.
        log_probs: of the tokens of the first answer at temperature 0. rounded: the same by the target in bfloat16.
        mistakes: the answers at temperature 0 of a drafter that an engine reads wrongly, by the mistake's name in
            `lab.planted_faults`; {} where none was tried.
    """

    target: str
    drafter: str
    drafter_digest: str = ""
    precision: str = ""
    depth: int
    max_new_tokens: int
    suites: list[str] = Field(default=[])
    limit: int | None = None
    seeds_above_0: int = 1
    first_seed: int = 0
    habits: str = ""
    prompts: list[ServedPrompt]
    texts: list[SentText] = Field(default=[])
    dtype: str = "float32"
    answers: dict[str, list[ServedAnswer]] = Field(default={})
    one_hot: dict[str, list[ServedAnswer]] = Field(default={})
    log_probs: list[float] = Field(default=[])
    rounded: list[float] = Field(default=[])
    mistakes: dict[str, list[ServedAnswer]] = Field(default={})

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if names := [t for t in self.answers if f"{float(t):g}" != t]:
            raise ValueError(f"{names[0][:40]!r} is no temperature as it is written here")
        for name, answers in (self.answers | self.one_hot | self.mistakes).items():
            seeds = {len(of_seeds) for answer in answers for of_seeds in (answer.counts, answer.lengths)}
            if len(answers) != len(self.prompts) or len(seeds) != 1 or 0 in seeds:
                raise ValueError(f"the answers of {name[:40]!r} are not one to each prompt and seed")
        return self

    @property
    def temperatures(self) -> list[float]:
        return [float(t) for t in self.answers]

    def at(self, temperature: float) -> list[ServedAnswer]:
        """Return the answers at a temperature."""
        return self.answers[f"{temperature:g}"]

    def seeds(self, temperature: float) -> int:
        """Return the number of answers to each prompt at a temperature."""
        return len(self.at(temperature)[0].counts)

    def never_drawn(self) -> Expectation:
        """Return the expectation of an engine that always proposes the most probable drafts."""
        return self.model_copy(update={"answers": self.answers | self.one_hot, "one_hot": {}})

    def save(self, file: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_atomically(file, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Expectation:
        """Read one that was saved; BadInputError if it cannot be read."""
        try:
            return cls.model_validate(parse_json(read_text(file, _LIMITS.num_bytes), str(file), _LIMITS))
        except (OSError, Refusal, ValidationError) as error:
            said = first_line(error)
            raise BadInputError(f"{file}: cannot be read as an expectation ({said}). Make it again.") from error


class _FirstPlaceSession(NgramSession):
    """A session that keeps the texts `texts` and searches them from their beginnings."""

    def __init__(self, config: NgramConfig, batch_size: int):
        super().__init__(config, batch_size)
        self.texts: list[list[int]] = [[] for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for text, new, count in zip(self.texts, tokens.tolist(), counts.values, strict=True):
            text += new[:count]

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._copied([*text, *tail], depth) for text, tail in zip(self.texts, tails, strict=True)]

    def _copied(self, text: list[int], depth: int) -> list[int]:
        for n in range(min(self.config.max_match, len(text) - 1), self.config.min_match - 1, -1):
            ends = (i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:])
            if (end := next(ends, None)) is not None:
                return text[end : end + depth]
        return []

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


class _WholeCopySession(_FirstPlaceSession):
    """A session that searches its texts from their ends."""

    def _copied(self, text: list[int], depth: int) -> list[int]:
        size, known = self.config.max_match, len(text) - 1  # without the last token, as it counts them
        if known <= size + depth + 1:
            return []
        places = (at for at in range(known - size - 1, 0, -1) if text[at : at + size] == text[-size:])
        at = next(places, None)
        copied = [] if at is None else text[at + size : min(at + size + depth, known)]
        return copied if len(copied) >= size else []


class FirstPlace(Ngram):
    """A drafter that copies from the first place where the last tokens stood."""

    session_class: ClassVar[type[_FirstPlaceSession]] = _FirstPlaceSession

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NgramSession:
        return self.session_class(self.config, batch_size)


class WholeCopy(FirstPlace):
    """A drafter that copies as llama.cpp's `ngram-simple` does: runs of one length, `max_match`."""

    session_class = _WholeCopySession


@dataclass(frozen=True)
class Habits:
    """The ways in which an engine's drafting differs from ours though it reads the drafter as we do.

    Attributes:
        within: it drafts no more tokens than the text still has room for.
        most_probable: it draws from so many of a draft model's most probable tokens; None for all.
        lookup: the class of n-grams that copies as it does.
        picked: the types of drafters whose drafts it never draws.
    """

    within: bool = False
    most_probable: int | None = None
    lookup: type[Ngram] = Ngram
    picked: tuple[str, ...] = ()

    def imitate(self, drafter: Drafter) -> Drafter:
        """Return a drafter that copies as the engine does; other drafters as they are."""
        return self.lookup(drafter.config) if isinstance(drafter, Ngram) else drafter

    @contextmanager
    def of(self, drafter: Drafter) -> Iterator[None]:
        """Make a draft model propose as it does in the engine."""
        if self.most_probable is None or not isinstance(drafter, DraftModel):
            yield
            return
        hook = drafter.model.get_output_embeddings().register_forward_hook(partial(_most_probable, self.most_probable))
        try:
            yield
        finally:
            hook.remove()


def _most_probable(count: int, _head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
    """Return the logits `[..., V]` with only the `count` largest of them left."""
    return logits.masked_fill(logits < logits.topk(count).values[..., -1:], float("-inf"))


# By the engine's name. vLLM (0.32): `ngram_proposer.py`. llama.cpp (11434): `get_n_draft_max` of its server,
# `spec_retune` of its speculative.cpp, `ngram-simple`.
HABITS = {
    "": Habits(),
    "vllm": Habits(lookup=FirstPlace),
    "llama.cpp": Habits(within=True, most_probable=10, lookup=WholeCopy, picked=("eagle3", "dflash")),
}


@dataclass(frozen=True)
class Trial:
    """How the expectation is made.

    Attributes:
        depth: draft tokens per round. limit: prompts per suite, None for all.
        seeds: answers to each prompt above temperature 0: more of them narrow our side's interval.
        first_seed: the seed of the first of them; the others follow.
        habits: the engine of `HABITS` whose habits our decoder takes over; "" for its own.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 4
    max_new_tokens: int = 64
    limit: int | None = 12
    seeds: int = 3
    first_seed: int = 0
    habits: str = ""


def expect(
    target: Target, drafter: Drafter, suites: Sequence[Suite], trial: Trial, console: Console | None = None
) -> Expectation:
    """Answer the suites' prompts with our decoder, at every temperature.

    Raises:
        BadInputError: a prompt leaves no room in the target's context.
    """
    asked = [ServedPrompt(suite=s.name, id=p.id, tokens=list(p.tokens)) for s in suites for p in s.some(trial.limit)]
    expected = Expectation(
        target=target.fingerprint().digest,
        drafter=drafter.name,
        depth=trial.depth,
        max_new_tokens=trial.max_new_tokens,
        dtype=str(target.dtype).removeprefix("torch."),
        habits=trial.habits,
        prompts=asked,
        texts=list(sent_texts(suites, target.tokenizer, trial.limit)),
    )
    writer = _Writer(target, HABITS[trial.habits].imitate(drafter), trial, asked)
    total = len(asked) * sum(1 if t == 0 else 2 * trial.seeds for t in trial.temperatures)
    with progress(console, "our own decoder", total, transient=True) as advance:
        for temperature in trial.temperatures:
            key = f"{temperature:g}"
            expected.answers[key] = writer.answer(temperature, "auto", advance)
            if temperature > 0:
                expected.one_hot[key] = writer.answer(temperature, "candidates", advance)
            else:
                text = expected.answers[key][0].tokens
                expected.log_probs = chosen_log_probs(target, asked[0].tokens, text)
                with torch.autocast(target.device.type, torch.bfloat16):
                    expected.rounded = chosen_log_probs(target, asked[0].tokens, text)
    return expected


def sent_texts(
    suites: Sequence[Suite], tokenizer: PreTrainedTokenizerBase | None, limit: int | None
) -> Iterator[SentText]:
    """Yield what each suite sends to a server: all its texts in one, or its first chat; and the vocabulary's tokens.

    Where no suite is of chats, the first text is asked as one, too: users come through the chat template.
    """
    if tokenizer is None:
        return
    words = tokenizer.batch_decode([[i] for i in range(0, len(tokenizer), 1 + len(tokenizer) // MOST_WORDS)])
    yield _sent_texts("the vocabulary", "\n".join(words), tokenizer)
    first = next((p for s in suites for p in s.prompts if p.text), None)
    has_chats = False
    for suite in suites:
        chat = next((p for p in suite.prompts if p.messages is not None), None)
        has_chats |= chat is not None
        texts = "\n".join(p.text for p in suite.some(limit))[:LONGEST_TEXT]
        if chat is not None:
            yield _sent_chat(suite.name, chat)
        elif texts.strip():
            yield _sent_texts(suite.name, texts, tokenizer)
    if has_chats or first is None or not tokenizer.chat_template:
        return
    messages = [{"role": "user", "content": first.text}]
    with suppress(BadInputError):  # a template may want other roles
        text = render(tokenizer, messages, "the first prompt as a chat", template=first.template)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield _sent_chat(first.suite, replace(first, messages=tuple(messages), tokens=tuple(tokens)))


def _sent_texts(name: str, texts: str, tokenizer: PreTrainedTokenizerBase) -> SentText:
    request = {"prompt": texts, "add_special_tokens": True}
    return SentText(name=name, request=request, tokens=tokenizer(texts)["input_ids"])


def _sent_chat(name: str, chat: Prompt) -> SentText:
    request = {"messages": list(chat.messages or ()), "add_generation_prompt": True, "add_special_tokens": False}
    request |= {"tools": chat.tools} if chat.tools else {}
    request |= {"chat_template_kwargs": dict(chat.template)} if chat.template else {}
    return SentText(name=name, request=request, tokens=list(chat.tokens))


def expect_mistakes(
    target: Target, drafters: Iterable[tuple[str, Drafter]], expected: Expectation, console: Console | None = None
) -> Expectation:
    """Return the expectation with the answers of wrongly read drafters, by their names, at temperature 0."""
    trial = Trial((0.0,), expected.depth, expected.max_new_tokens, habits=expected.habits)
    mistakes = {}
    for name, drafter in drafters:
        with progress(console, f"our decoder, mistaken: {name}", len(expected.prompts), transient=True) as advance:
            mistakes[name] = _Writer(target, drafter, trial, expected.prompts).answer(0.0, "auto", advance)
    return expected.model_copy(update={"mistakes": mistakes})


@torch.no_grad()
def _log_probabilities(target: Target, prompt: Sequence[int], text: Sequence[int], temperature: float) -> Tensor:
    """Return the target's log-probabilities of every token at each place of a text after a prompt, `[T, V]`."""
    tokens = torch.tensor([[*prompt, *text]], device=target.device)
    places = torch.arange(len(prompt) - 1, tokens.shape[1] - 1, device=target.device)
    logits = target.forward(tokens, at=places[None]).logits
    assert logits is not None
    return (logits[0].float() / temperature).log_softmax(-1)


def margin_at(target: Target, prompt: Sequence[int], text: Sequence[int], index: int) -> float:
    """Return by how much the target's largest logit at a place of a text exceeds the next one."""
    first, second = _log_probabilities(target, prompt, text[: index + 1], 1.0)[-1].topk(2).values.tolist()
    return float(first - second)


def chosen_log_probs(target: Target, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    """Return the target's log-probabilities of a text's own tokens, at temperature 1."""
    chosen = torch.tensor(text, device=target.device)[:, None]
    return [float(p) for p in _log_probabilities(target, prompt, text, 1.0).gather(1, chosen)[:, 0]]


def surprise(target: Target, prompt: Sequence[int], text: Sequence[int], temperature: float) -> tuple[float, float]:
    """Return by how much less probable a text is than draws from the target at its places, in nats, and the variance.

    Both follow from the target alone: of draws from it the first is 0 on average.
    """
    drawn = _log_probabilities(target, prompt, text, temperature).clamp(min=-1e4)  # 0 · log 0 is 0
    chosen = drawn.gather(1, torch.tensor(text, dtype=torch.long, device=drawn.device)[:, None])
    entropy = -(drawn.exp() * drawn).sum(1)
    variance = (drawn.exp() * drawn**2).sum(1) - entropy**2
    return float(-chosen.sum() - entropy.sum()), float(variance.sum())


class _Writer:
    """Our decoder, answering the prompts in batches; text and rounds do not depend on the rest of a batch."""

    def __init__(self, target: Target, drafter: Drafter, trial: Trial, asked: Sequence[ServedPrompt]):
        self.trial = trial
        self.asked = asked
        self.eos = set(target.eos_ids)
        self.decoder = Decoder(target, drafter)
        self.drafter = drafter
        self.habits = HABITS[trial.habits]

    def answer(self, temperature: float, rule: str, advance: Advance) -> list[ServedAnswer]:
        """Answer every prompt with each seed (at temperature 0 all seeds are the same)."""
        seeds = range(self.trial.first_seed, self.trial.first_seed + (self.trial.seeds if temperature else 1))
        with self.habits.of(self.drafter):
            texts = [list(self._seed(Sampling(temperature=temperature, seed=s), rule, advance)) for s in seeds]
        # The first token is emitted by no round.
        room = self.trial.max_new_tokens - 1 if self.habits.within else None
        return [
            ServedAnswer(
                tokens=per_seed[0][0],
                ended=not self.eos.isdisjoint(per_seed[0][0][-1:]),
                lengths=[len(text) for text, _ in per_seed],
                counts=[DraftCounts.of(rounds, room) for _, rounds in per_seed],
            )
            for per_seed in zip(*texts, strict=True)
        ]

    def _seed(self, sampling: Sampling, rule: str, advance: Advance) -> Iterator[tuple[list[int], list[Round]]]:
        plan = Plan(depth=self.trial.depth, verify=rule)
        for first in range(0, len(self.asked), BATCH):
            batch = [a.tokens for a in self.asked[first : first + BATCH]]
            numbers = range(first, first + len(batch))
            output = self.decoder.generate(batch, self.trial.max_new_tokens, sampling, plan, sequence_ids=list(numbers))
            advance(len(batch), "")
            yield from zip(output.tokens, output.rounds, strict=True)
