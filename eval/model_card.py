"""The model card of a drafter on the Hub: metadata, figures, and how engines serve it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from yaml import YAMLError

from ..common import BadInputError
from ..common.errors import first_line
from ..formats.engines import launch
from ..formats.support import ENGINES, SERVED, support_of
from ..targets.model_folder import NAMES, PUBLISHED, is_local

END = "<!-- Outrider writes what stands above. What stands below is kept. -->"
# The folders before the last name of a path that begins at the root, at home, or at a drive.
_FOLDERS = re.compile(r"(?:^|(?<=[=\[,'\"])|(?<=, ))(?:~|[A-Za-z]:)?[/\\](?:[^,'\"\]]*[/\\])?(?=[^,'\"\]/\\])")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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


def hub_id(target: str | None) -> str | None:
    """Return the Hub id of a target by the place it was loaded from; None for a folder, or what ships with Outrider."""
    if target is None or target in PUBLISHED:
        return PUBLISHED.get(target or "")
    return target if _HUB_ID.fullmatch(target) and target not in NAMES and not is_local(target) else None


def portable(values: object) -> object:
    """Return plain values in which paths of this machine are names: `/home/me/prompts.jsonl` is `prompts.jsonl`."""
    if isinstance(values, dict):
        return {key: portable(value) for key, value in values.items()}
    if isinstance(values, list):
        return [portable(value) for value in values]
    return _FOLDERS.sub("", values) if isinstance(values, str) else values


def portable_command(line: str) -> str:
    """Return a shell line in which paths of this machine are names; "" for what is none."""
    with suppress(ValueError):
        return shlex.join(_FOLDERS.sub("", word) for word in shlex.split(line))
    return ""


def serving(drafter: str, target: str, depth: int, dtype: str) -> list[str]:
    """Return how each engine serves the drafter of the pair in `pair`, or why it does not, in lines of Markdown.

    Args:
        drafter: its type. target: the place of its target for engines, `EXPORT` in it being the export's folder.
    """
    lines: list[str] = []
    for engine, title in ENGINES.items():
        one = support_of(drafter, engine)
        if not one.layout:
            lines += [f"**{title}**: no ({one.said}).", ""]
            continue
        known = SERVED.get((engine, drafter))
        proven = "read back by the rules of its source" if known is None else f"served by {known.build}, {known.date}"
        folder = f"exported-{engine}"
        command = launch(engine, drafter, target.replace("EXPORT", folder), folder, depth, dtype).command
        exported = f"outrider export pair --to {engine} --depth {depth} --out {folder}"
        lines += [f"**{title}** (drafters of this type were {proven}):", "", "```sh", exported]
        lines += [*filter(None, [command]), "```", ""]
    return lines
