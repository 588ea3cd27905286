"""The prompts that a measurement runs on, and their identity by content.

A row of `turns` is a conversation: each later turn is asked after the plain target's own greedy answers to those before
it. All contestants, at all temperatures, get this one history, so that they are compared on the same prompts.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..decode import Decoder, Plan
from ..distill.conversation import next_question
from ..distill.prompt_table import Prompt, digest_prompts
from ..distill.recipe_prompts import PromptReading, collect
from ..distill.sources import some_of_each
from ..recipes import EvalSpec
from ..recipes.suite_names import PACKAGED, find_suites
from ..targets import Target
from ..targets.images import ImageInputs, ImageReader
from .reports.figures import ALL


@dataclass(frozen=True)
class Suite:
    """A named list of prompts; the digest is a SHA-256 over their ids, tokens and later turns, in order.

    `left_out`: prompts that were read and are longer than they may be. `unasked`: later turns that are not asked, since
    there is no chat template or a context is filled. `learnt`: prompts that the drafter learned from, if that is
    allowed.
    """

    name: str
    prompts: list[Prompt]
    digest: str
    left_out: int = 0
    unasked: int = 0
    learnt: int = 0

    def some(self, limit: int | None) -> list[Prompt]:
        """Return at most `limit` prompts, as evenly over their categories as they allow, in their order."""
        return some_of_each(self.prompts, limit, lambda prompt: prompt.category)


def load_suites(
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    template: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> list[Suite]:
    """Read suites: `code`, `docs` and `prose` ship with Outrider, anything else is a prompt file or on the Hub.

    A file's format is recognised by its keys, as that of training data is (`distill.dataset_formats`). Of a chat the
    last question is asked, after its own answers; of `turns` every one (see `with_later_turns`).

    Args:
        limit: so many prompts of each, some of every category; None for all.
        template: arguments of the chat template (`template` in a recipe).
        images: the target's reader of them (`Target.images`); None for a target that sees none.

    Raises:
        BadInputError: no such suite or file, an empty one, a suite given twice, a row that cannot be asked, or two
            prompts with one id.
    """
    if not names:
        raise BadInputError(f"no suites were given; packaged ones: {', '.join(PACKAGED)}.")
    reading = PromptReading(template=template or {}, suite=True, images=images)
    return [_read(title, source, tokenizer, limit, reading) for title, source in find_suites(names)]


def _read(
    title: str, source: str, tokenizer: PreTrainedTokenizerBase, limit: int | None, reading: PromptReading
) -> Suite:
    found = collect([source], tokenizer, limit, reading)
    [counts] = found.sources
    if counts.dropped:
        raise BadInputError(
            f"the suite {source} has {counts.reasons()}.{counts.example()} A suite drops no row by itself: mend "
            "the row, or remove it."
        )
    return replace(make_suite(title, found.prompts), unasked=counts.unasked)


def suites_of(
    target: Target,
    settings: EvalSpec,
    template: Mapping[str, Any] | None = None,
    learnt: Set[str] = frozenset(),
    data: str = "",
    allow_leaks: bool = False,
) -> list[Suite]:
    """Return the suites of a recipe's `eval` as `target` will be asked them; it needs no weights yet.

    Args:
        learnt, data, allow_leaks: see `checked_for_leaks`.

    Raises:
        BadInputError: as `load_suites`; a prompt leaves no room for an answer; every prompt is too long, or was learnt.
    """
    suites = load_suites(settings.suites, target.require_tokenizer(), settings.limit, template, target.images)
    suites = [checked_for_leaks(suite, learnt, data, allow_leaks) for suite in suites]
    if settings.max_prompt_tokens is not None:
        suites = [_without_long(suite, settings.max_prompt_tokens, "eval.max_prompt_tokens") for suite in suites]
    most = None if target.max_context is None else target.max_context - settings.max_new_tokens
    if most is not None and (long := [length for length in settings.contexts if length > most]):
        raise BadInputError(
            f"eval.contexts: {long[0]} tokens and {settings.max_new_tokens} new ones exceed the target's context of "
            f"{target.max_context}; take at most {most}."
        )
    if settings.contexts:
        suites = [filled(suite, length) for suite in suites for length in settings.contexts]
    jobs = make_jobs(suites)
    check_lengths(target, jobs, settings)
    if settings.batch_sizes and max(settings.batch_sizes) > len(jobs):
        raise BadInputError(
            f"eval.batch_sizes: a batch is between 1 and the number of prompts, {len(jobs)}; got "
            f"{max(settings.batch_sizes)}. Take more prompts or smaller batches."
        )
    return suites


def checked_for_leaks(suite: Suite, learnt: Set[str], data: str, allowed: bool = False) -> Suite:
    """Return the suite with the number of prompts whose questions the drafter learned, perhaps with others after them.

    Args:
        learnt: digests of questions, as `Prompt.asked_digests`. data: the name of that training data, for people.

    Raises:
        BadInputError: there are such prompts, and that is not allowed.
    """
    firsts = ((p, replace(p, later=()).asked_digests()[-1:]) for p in suite.prompts)
    asked = [p for p, digests in firsts if not learnt.isdisjoint(digests)]
    if asked and not allowed:
        raise BadInputError(
            f"the suite {suite.name} asks in {asked[0].id!r} what the drafter learned from {data}: "
            f"{asked[0].text[:60]!r} ({len(asked)} of {len(suite.prompts)} prompts). A drafter that is measured on "
            "what it learned looks better than it is: measure on other prompts, or go on with data.allow_leaks=true, "
            "and the report counts them."
        )
    return replace(suite, learnt=len(asked))


def _without_long(suite: Suite, longest: int, key: str) -> Suite:
    """Return the suite without the prompts of more than `longest` tokens, counted."""
    kept = [prompt for prompt in suite.prompts if len(prompt.tokens) <= longest]
    if not kept:
        raise BadInputError(
            f"suite {suite.name!r}: all of its {len(suite.prompts)} prompts have more than {longest} tokens; raise "
            f"{key}."
        )
    left_out = suite.left_out + len(suite.prompts) - len(kept)
    return replace(make_suite(suite.name, kept), left_out=left_out, unasked=suite.unasked, learnt=suite.learnt)


def filled(suite: Suite, length: int) -> Suite:
    """Return the suite `name@length`, in which texts of its other prompts stand before each prompt, `length` tokens
    in all. Longer prompts are left out, and of a conversation only the first turn is asked.

    Raises:
        BadInputError: all prompts are longer, or the others are too short to fill a context: said again, a text would
            flatter drafters that copy.
    """
    fitting = _without_long(suite, length, "eval.contexts")
    texts = [prompt.tokens for prompt in fitting.prompts]
    most = sum(map(len, texts))
    if most < length:
        raise BadInputError(
            f"eval.contexts: the prompts of suite {suite.name!r} that have no more than {length} tokens have {most} "
            f"together, and no text stands twice in a context; take at most {most}, or a suite with more prompts."
        )

    def fill(place: int, prompt: Prompt) -> Prompt:
        others = list(chain(*texts[place + 1 :], *texts[:place]))
        before = others[len(others) + len(prompt.tokens) - length :]  # its end, so that no text breaks off there
        return replace(prompt, tokens=(*before, *prompt.tokens), later=())

    made = make_suite(f"{suite.name}@{length}", [fill(i, prompt) for i, prompt in enumerate(fitting.prompts)])
    unasked = fitting.unasked + sum(len(prompt.later) for prompt in fitting.prompts)
    return replace(made, left_out=fitting.left_out, unasked=unasked, learnt=suite.learnt)


def make_suite(name: str, prompts: Sequence[Prompt]) -> Suite:
    """Return a suite of prompts in memory.

    Raises:
        BadInputError: it is empty, an id occurs twice, or it is called "all".
    """
    if name == ALL:
        raise BadInputError(
            f"a suite cannot be called {ALL!r}, which stands for all suites together in a report; rename the file."
        )
    if not prompts:
        raise BadInputError(f"suite {name!r} holds no prompts.")
    identifier, count = Counter(p.id for p in prompts).most_common(1)[0]
    if count > 1:
        raise BadInputError(
            f"suite {name!r}: the id {identifier!r} occurs {count} times; "
            "reports are compared prompt by prompt, so ids must be unique."
        )
    return Suite(name, list(prompts), digest_prompts(prompts))


@dataclass(frozen=True)
class PromptJob:
    """One prompt to complete; `sequence` keys its randomness, which other prompts do not change.

    `turn`: its place in the conversation, from 1.
    """

    suite: str
    prompt: Prompt
    sequence: int
    turn: int = 1

    @property
    def length(self) -> int:
        """The tokens of the prompt."""
        return len(self.prompt.tokens)

    def images(self, target: Target) -> ImageInputs | None:
        """Return the prompt's images as the target reads them; None for none."""
        return target.image_inputs(self.prompt.tokens, self.prompt.images)

    @property
    def request(self) -> str:
        """The prompt's id, and its turn if that is not the first."""
        return self.prompt.id if self.turn == 1 else f"{self.prompt.id}, turn {self.turn}"


def usual_job(jobs: Sequence[PromptJob]) -> PromptJob:
    """Return a prompt of median length."""
    return sorted(jobs, key=lambda job: job.length)[len(jobs) // 2]


def make_jobs(suites: Sequence[Suite], limit: int | None = None) -> list[PromptJob]:
    """Return at most `limit` prompts of each suite, suite by suite."""
    return [_job(s.name, p) for s in suites for p in s.some(limit)]


def _job(suite: str, prompt: Prompt, turn: int = 1) -> PromptJob:
    key = f"{suite}/{prompt.id}" + (f"/{turn}" if turn > 1 else "")
    return PromptJob(suite, prompt, zlib.crc32(key.encode()), turn)


def with_later_turns(
    target: Target,
    jobs: Sequence[PromptJob],
    max_new_tokens: int,
    max_prompt_tokens: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[PromptJob]:
    """Return `jobs`, each followed by the later turns of its conversation, after the plain target's greedy answers.

    A conversation ends before a question that leaves no room for its answer, that is longer than `max_prompt_tokens`,
    or that the chat template refuses. Each is answered by itself: batches of other prompts could tip a near-tie.

    Args:
        tick: called after each of `jobs`.
    """
    decoder, asked = Decoder(target), list[PromptJob]()
    rooms = [] if target.max_context is None else [target.max_context - max_new_tokens]
    room = min(rooms + ([] if max_prompt_tokens is None else [max_prompt_tokens]), default=None)
    for first in jobs:
        asked.append(first)
        answers: list[list[int]] = []
        while len(answers) < len(first.prompt.later):
            last = asked[-1]
            out = decoder.generate([last.prompt.tokens], max_new_tokens, plan=Plan(0), images=[last.images(target)])
            answers += out.tokens
            tokens = next_question(first.prompt, answers, target.require_tokenizer(), room)
            if tokens is None:
                break
            asked.append(_job(first.suite, replace(first.prompt, tokens=tokens), 1 + len(answers)))
        tick()
    return asked


def check_lengths(target: Target, jobs: Sequence[PromptJob], settings: EvalSpec) -> None:
    """Raise BadInputError for a prompt that leaves no room for the answer, or with images where only text works."""
    asked = next((name for name in ("contexts", "batch_sizes") if getattr(settings, name)), None)
    if asked and (seeing := next((job.suite for job in jobs if job.prompt.images), None)):
        raise BadInputError(
            f"eval.{asked}: prompts of the suite {seeing} have images, and are measured one at a time as they are; "
            f"leave out eval.{asked}, or the suite."
        )
    longest = max(jobs, key=lambda job: len(job.prompt.tokens))
    needed = len(longest.prompt.tokens) + settings.max_new_tokens
    if target.max_context is not None and needed > target.max_context:
        raise BadInputError(
            f"prompt {longest.prompt.id!r} has {len(longest.prompt.tokens)} tokens; with {settings.max_new_tokens} "
            f"new ones it exceeds the target's context of {target.max_context}. "
            "Lower eval.max_new_tokens, or leave such prompts out with eval.max_prompt_tokens="
            f"{max(1, target.max_context - settings.max_new_tokens)}."
        )
