"""A server beside what its pair needs: its version, its depth, its tokenizer and its chat template.

Prompts are sent as token ids, so a server that makes other tokens of a user's text would show nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..common.http_client import BadAnswerError
from .diagnosis import SUSPECTS, Suspicion
from .engine import ABOUT, Engine, SentText
from .reference_run import Expectation

Oldest = Mapping[str, tuple[str, str]]  # by the engine's name, see `formats.oldest_version`


def check_server(engine: Engine, expected: Expectation, oldest: Oldest) -> tuple[dict[str, Any], list[Suspicion]]:
    """Return facts about a server, and the faults among them."""
    name = engine.counters().engine
    about, found = engine.about(name), list[Suspicion]()
    facts: dict[str, Any] = {} if about.version is None else {"version": about.version}
    needed, why = oldest.get(name, ("0.0.0", ""))
    if about.version is not None and [0, 0, 0] < _numbers(about.version) < _numbers(needed):
        found.append(_fault("version", f"the server says it is {name} {about.version}, {needed} is needed: {why}"))
    if about.drafted not in (None, expected.depth + 1) and expected.drafter != "ngram":
        because = f"the server says that it verifies {about.drafted} tokens a round, {expected.depth} + 1 expected"
        found.append(_fault("depth", because))
    if name not in ABOUT or not expected.texts:
        why = f"{name} is asked for none" if name not in ABOUT else "there is no text to compare"
        return facts | {"unchecked": f"its tokenizer and chat template ({why})"}, found
    try:
        found += _other_tokens(engine, expected.texts)
    except BadAnswerError as error:
        facts["unchecked"] = f"its tokenizer and chat template ({error.reason} from /tokenize)"
    return facts, found


def _other_tokens(engine: Engine, texts: list[SentText]) -> Iterator[Suspicion]:
    """Yield the first text that the server reads otherwise; else the first chat, which is then its template's fault."""
    for text in sorted(texts, key=lambda text: "messages" in text.request):
        if (theirs := engine.tokenize(text)) != text.tokens:
            pairs = enumerate(zip(theirs, text.tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(text.tokens)))
            kind, what = ("template", "a chat") if "messages" in text.request else ("tokenizer", "the texts")
            made = f"the server makes {len(theirs)} tokens of {what} of {text.name}"
            yield _fault(kind, f"{made}, we make {len(text.tokens)}; they part at {at}")
            return


def _numbers(version: str) -> list[int]:
    """Return the three numbers of a version; zeros if it has none, as a development copy's 0.0.0."""
    match = re.match(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})", version)
    return [int(part) for part in match.groups()] if match else [0, 0, 0]


def _fault(kind: str, because: str) -> Suspicion:
    return Suspicion(kind=kind, temperature=None, because=because, suspect=SUSPECTS[kind])
