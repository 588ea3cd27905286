"""The prompts that a measurement runs on, and their identity by content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..distill.collect import read_prompts
from ..distill.prompts import Prompt, digest_prompts
from ..recipes.suites import PACKAGED, find_suite
from .reports.figures import ALL


@dataclass(frozen=True)
class Suite:
    """A named list of prompts.

    Attributes:
        digest: SHA-256 over ids and tokens, in order. Two suites with one digest ask for the same.
    """

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
    suites = [_load(name, tokenizer, limit, template) for name in names]
    for name, count in Counter(s.name for s in suites).items():
        if count > 1:
            raise BadInputError(
                f"{count} suites are called {name!r}; figures are reported by name, so give each file another one."
            )
    return suites


def _load(
    name: str, tokenizer: PreTrainedTokenizerBase, limit: int | None, template: Mapping[str, Any] | None
) -> Suite:
    title, file = find_suite(name)
    return make_suite(title, read_prompts([str(file)], tokenizer, limit=limit, template=template))


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
