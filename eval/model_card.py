"""The model card of a drafter on the Hub: metadata, figures, and how engines serve it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from yaml import YAMLError

from ..common import BadInputError
from ..common.errors import first_line
from ..common.hub import HUB_ID
from ..formats.engines import launch
from ..formats.support import ENGINES, SERVED, support_of
from ..targets.model_folder import NAMES, PUBLISHED, is_local

END = "<!-- Outrider writes what stands above. What stands below is kept. -->"
# The folders before the last name of a path that begins at the root, at home, or at a drive.
_FOLDERS = re.compile(r"(?:^|(?<=[=\[,'\"])|(?<=, ))(?:~|[A-Za-z]:)?[/\\](?:[^,'\"\]]*[/\\])?(?=[^,'\"\]/\\])")
_NAMED = partial(_FOLDERS.sub, "")


def model_card(
    body: str,
    title: str,
    drafters: Iterable[str] = (),
    bases: Sequence[str] = (),
    results: Sequence[EvalResult] = (),
    earlier: str = "",
) -> str:
    """Return the text of a model card.

    Args:
        drafters: their types, which become tags. bases: the Hub ids of their targets.
        earlier: the card in whose place it goes: its other metadata, such as a license, and what
            stands below ours stay.

    Raises:
        BadInputError: the metadata of the earlier card cannot be read.
    """
    try:
        old = ModelCard(earlier) if earlier else None
    except (YAMLError, ValueError, TypeError) as error:
        raise BadInputError(
            f"{REPOCARD_NAME} there: its metadata is not that of a model card ({first_line(error)}). Mend it or "
            "remove it."
        ) from None
    data = ModelCardData() if old is None else old.data
    data["library_name"] = "outrider"
    data["tags"] = list(dict.fromkeys([*(data.get("tags") or []), "speculative-decoding", *drafters]))
    data["base_model"] = (bases[0] if len(bases) == 1 else list(bases)) if bases else data.get("base_model")
    data["model_name"] = title if results else None
    data["eval_results"] = list(results) or None
    below = "" if old is None else earlier.partition(END)[2] if END in earlier else f"\n\n{old.text.strip()}"
    return f"---\n{data.to_yaml()}\n---\n\n{body.rstrip()}\n\n{END}{below.rstrip()}\n"


def results_of(figures: Mapping[str, float | None], suites: str, of: str = "") -> list[EvalResult]:
    """Return the figures of a drafter that are known, by kind, as a card's metadata has them; `of` says whose."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="outrider-suites",
            dataset_name=suites,
            metric_type=kind,
            metric_value=round(value, 4),
            metric_name=f"{kind}{of}" if of else None,
        )
        for kind, value in figures.items()
        if value is not None
    ]


@dataclass(frozen=True)
class CardTarget:
    """The target of a drafter, as a card names it.

    Attributes:
        path: that it was loaded from. adapted: whether an adapter was merged into it. digest, dtype: its fingerprint's.
    """

    path: str | None
    adapted: bool
    digest: str
    dtype: str

    @property
    def is_ours(self) -> bool:
        """Whether Outrider knows it by a name of its own."""
        return self.path in NAMES

    @property
    def hub_id(self) -> str | None:
        """Its Hub id; None for a folder, or what ships with Outrider."""
        path = PUBLISHED.get(self.path or "", self.path or "")
        return path if HUB_ID.fullmatch(path) and path not in NAMES and not is_local(path) else None

    def sentence(self, drafter: str) -> str:
        """Return what a drafter of this type is for."""
        named = f"`{self.path}`, which Outrider knows" if self.is_ours else "a target that is not on the Hub"
        if self.hub_id is not None:
            named = f"[{self.hub_id}](https://huggingface.co/{self.hub_id})"
        adapted = " with an adapter" if self.adapted else ""
        return (
            f"A speculative drafter of type `{drafter}` for {named}{adapted}, and for no other: the target's content "
            f"has the SHA-256 `{self.digest}` ({self.dtype})."
        )


def portable(values: object, renamed: Callable[[str], str] = _NAMED) -> object:
    """Return plain values in which paths of this machine are names: `/home/me/prompts.jsonl` is `prompts.jsonl`.

    `renamed`: what becomes of each text instead.
    """
    if isinstance(values, dict):
        return {key: portable(value, renamed) for key, value in values.items()}
    if isinstance(values, list):
        return [portable(value, renamed) for value in values]
    return renamed(values) if isinstance(values, str) else values


def portable_command(line: str) -> str:
    """Return a shell line in which paths of this machine are names; "" for what is none."""
    with suppress(ValueError):
        return shlex.join(_FOLDERS.sub("", word) for word in shlex.split(line))
    return ""


def serving(drafter: str, target: CardTarget, depth: int) -> list[str]:
    """Return how each engine serves the drafter of the pair in `pair`, or why it does not, in lines of Markdown."""
    lines: list[str] = []
    for engine, title in ENGINES.items():
        one = support_of(drafter, engine)
        if not one.layout:
            lines += [f"**{title}**: no ({one.said}).", ""]
            continue
        known = SERVED.get((engine, drafter))
        proven = "read back by the rules of its source" if known is None else f"served by {known.build}, {known.date}"
        folder = f"exported-{engine}"
        place = f"{folder}/target" if target.adapted else target.hub_id or "path/to/target"
        command = launch(engine, drafter, place, folder, depth, target.dtype).command
        exported = f"outrider export pair --to {engine} --depth {depth} --out {folder}"
        lines += [f"**{title}** (drafters of this type were {proven}):", "", "```sh", exported]
        lines += [*filter(None, [command]), "```", ""]
    return lines
