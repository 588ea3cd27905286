"""The drafter of a finished training on the Hub (`training.push_to_hub`), with its recipe and a model card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import EntryNotFoundError

from ..common import BadInputError
from ..common.digests import is_harmless
from ..common.errors import OutriderError
from ..common.hub import HUB_ADVICE, hub_reason
from ..common.untrusted_files import read_text, yaml_text
from ..eval.model_card import CardTarget, model_card, portable, serving
from ..heads.registry import with_defaults
from ..recipes import Recipe
from ..targets import Target
from .arguments import Push, unpushed
from .provenance import RECIPE


def claim(push: Push) -> None:
    """Make the repository if it is not there; BadInputError, before any work, if this user cannot."""
    api = HfApi()
    with _explained(push, api, "Nothing was trained."):
        api.create_repo(push.repository, private=push.private, exist_ok=True)


def push_drafter(push: Push, recipe: Recipe, target: Target, drafter: str, folder: Path, held_out: str) -> None:
    """Commit the files of a drafter in `folder`, the recipe and the card; what is there already is not sent again.

    Args:
        drafter: its type. held_out: its figures on held-out rows, as a sentence.

    Raises:
        BadInputError: the Hub does not take them. The drafter on this machine is whole.
    """
    api = HfApi()
    kept = f"The drafter is whole in {folder}: the same command again trains nothing, and pushes it."
    with _explained(push, api, kept):
        files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not is_harmless(file))
        operations = [CommitOperationAdd(file.relative_to(folder).as_posix(), file) for file in files]
        settings = {"drafter": with_defaults(recipe.drafter), "training": unpushed(recipe.training)}
        whole = recipe.model_dump(mode="json") | settings
        operations.append(CommitOperationAdd(RECIPE, yaml_text(portable(whole)).encode()))
        card = _card(push.repository, recipe, target, drafter, held_out, _earlier_card(push, api))
        operations.append(CommitOperationAdd(REPOCARD_NAME, card.encode()))
        api.create_commit(push.repository, operations, commit_message=f"Add the drafter of {recipe.name}")


def _earlier_card(push: Push, api: HfApi) -> str:
    try:
        return read_text(Path(api.hf_hub_download(push.repository, REPOCARD_NAME)))
    except EntryNotFoundError:
        return ""


def _card(repository: str, recipe: Recipe, target: Target, drafter: str, held_out: str, earlier: str) -> str:
    fingerprint, adapted = target.fingerprint(), target.source.get("adapter") is not None
    about = CardTarget(recipe.target.path, adapted, fingerprint.digest, fingerprint.dtype)
    elsewhere = "" if about.hub_id or about.is_ours else " target.path=path/to/target"
    lines = [
        f"# {repository.rpartition('/')[2]}",
        "",
        f"{about.sentence(drafter)} It was trained by Outrider {version('outrider')}, of `{RECIPE}`:",
        "",
        "```sh",
        f"outrider train {RECIPE}{elsewhere}",
        "```",
        "",
        f"{held_out} **No speedup was measured**: `outrider eval` does that.",
        "",
        "An engine gets it as part of a pair with its target:",
        "",
        "```sh",
        f"hf download {repository} --local-dir drafter",
        f"outrider pair new pair drafter/{RECIPE}{elsewhere} --drafter drafter",
        "```",
        "",
        *serving(drafter, about, recipe.eval.depth),
    ]
    bases = [about.hub_id] if about.hub_id else []
    return model_card("\n".join(lines), repository, [drafter], bases, earlier=earlier)


@contextmanager
def _explained(push: Push, api: HfApi, consequence: str) -> Iterator[None]:
    """Turn the errors of the Hub's library, which are of any kind, into one sentence."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        raise BadInputError(
            f"training.hub_model_id, {push.repository}: {hub_reason(error, api)} {HUB_ADVICE} {consequence}"
        ) from error
