"""The prompts that a measurement runs on, and their identity by content."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..distill.prompt_table import Prompt, digest_prompts
from ..distill.recipe_prompts import read_prompts
from ..recipes import EvalSpec
from ..recipes.suites import PACKAGED, find_suites
from ..targets import Target
from .reports.figures import ALL


@dataclass(frozen=True)
class Suite:
    """A named list of prompts; the digest is a SHA-256 over their ids and tokens, in order."""

    name: str
    prompts: list[Prompt]
    digest: str


def load_suites(
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[Suite]:
    """Read suites: `code`, `docs` and `prose` ship with Outrider, anything else is a prompt file.

    Args:
        limit: the first so many prompts of each; None for all.
        template: arguments of the chat template (`template` in a recipe).

    Raises:
        BadInputError: no such suite or file, an empty one, a suite given twice, or two prompts with one id.
    """
    if not names:
        raise BadInputError(f"no suites were given; packaged ones: {', '.join(PACKAGED)}.")
    return [
        make_suite(title, read_prompts([str(file)], tokenizer, limit=limit, template=template))
        for title, file in find_suites(names)
    ]


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
    """One prompt to complete; `sequence` keys its randomness, which other prompts do not change."""

    suite: str
    prompt: Prompt
    sequence: int


def make_jobs(suites: Sequence[Suite], limit: int | None = None) -> list[PromptJob]:
    """Return the first `limit` prompts of each suite, suite by suite."""
    return [PromptJob(s.name, p, zlib.crc32(f"{s.name}/{p.id}".encode())) for s in suites for p in s.prompts[:limit]]


def check_lengths(target: Target, jobs: Sequence[PromptJob], settings: EvalSpec) -> None:
    """Raise BadInputError for a prompt that leaves no room for the answer."""
    longest = max(jobs, key=lambda job: len(job.prompt.tokens))
    needed = len(longest.prompt.tokens) + settings.max_new_tokens
    if target.max_context is not None and needed > target.max_context:
        raise BadInputError(
            f"prompt {longest.prompt.id!r} has {len(longest.prompt.tokens)} tokens; with {settings.max_new_tokens} "
            f"new ones it exceeds the target's context of {target.max_context}. "
            "Lower eval.max_new_tokens or leave that prompt out."
        )
