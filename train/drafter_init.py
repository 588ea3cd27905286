"""A drafter's first weights: new ones, or those of a saved drafter (`drafter.init: <folder>`).

Where a drafter can be new in several ways, `init` may also be a word of its config (`random`, `pretrained`, `prune`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError, OutriderError
from ..common.errors import LIBRARY_ERRORS, reason
from ..distill.data_set import provenance
from ..distill.sources import check_sources
from ..eval.measure import baseline_config
from ..heads import HEADS, Drafter, drafter_config, load_drafter
from ..heads.registry import init_words, is_warm, saved_type
from ..heads.saved import CONFIG, read_config
from ..recipes import Recipe
from ..recipes.suite_names import find_suites
from ..targets import Target
from .arguments import packing_of

# Settings of the training or of measurement, which leave the weights' names and shapes alone. Any other setting must
# agree with the saved drafter; where its first weights once came from no longer matters.
FREE = {"loss", "feature_loss", "noise", "steps", "decay", "weighting", "depths"}
_PAST = {"path", "prune", "init_from_target", "tokenizer"}
_log = logging.getLogger(__name__)


def check_drafter(values: dict[str, Any]) -> type[Drafter]:
    """Return the class of a `drafter:` section; one that cannot be trained is refused, before anything is loaded.

    Raises BadInputError for an unknown type or key, a missing `init` folder, or a drafter without weights.
    """
    if is_warm(values):
        kind = saved_type(read_config(warm_folder(values)))
        if values.get("type", kind) != kind:
            raise BadInputError(
                f"drafter.init holds a drafter of type {kind!r}, drafter.type says {values['type']!r}; they must agree."
            )
        values = {k: v for k, v in values.items() if k != "init"} | {"type": kind}
    drafter_class, _ = drafter_config(values)
    if len(set(taps := values.get("taps") or ())) < len(taps):
        raise BadInputError(f"drafter.taps: expected each hidden state once, found {list(taps)}.")
    if not drafter_class.trainable:
        raise BadInputError(
            f"drafter.type {drafter_class.name!r} has no weights: there is nothing to train. Measure it beside a "
            f"trained drafter (eval.baselines: [{drafter_class.name}] in that one's recipe), or save it, and name its "
            "folder with --drafter."
        )
    return drafter_class


def check_abilities(recipe: Recipe, drafter_class: type[Drafter], own: type[Drafter]) -> None:
    """Refuse a drafter that cannot learn, or not as the recipe asks; its `own` class may be another than its loss's."""
    name, spec = drafter_class.name, recipe.data
    if not drafter_class.trainable:
        raise BadInputError(f"a {name} drafter has no weights: there is nothing to train.")
    for baseline in recipe.eval.baselines:
        baseline_config(baseline)  # what will be measured after the training
    find_suites(recipe.eval.suites)
    if spec.responses is None:
        check_sources(spec.prompts)
    for folder, read in ((spec.responses, provenance), (spec.drafter, read_config)):
        if folder is not None:
            read(Path(folder).expanduser())
    if 0 < (limit := recipe.drafter.get("max_position_embeddings") or 0) < spec.max_new_tokens:
        raise BadInputError(
            f"drafter.max_position_embeddings is {limit}, and answers alone have {spec.max_new_tokens} tokens (data."
            "max_new_tokens): an engine drafts no further than it says; leave it out, and it is the target's."
        )
    if spec.on_policy and not own.writes_text:
        raise BadInputError(
            f"data.on_policy is {spec.on_policy:g}, but a drafter of type {own.name!r} writes no text of its own (it "
            "reads the target's hidden states, or has no weights); leave out data.on_policy, or train a draft_model."
        )
    if packing_of(recipe.training) is not None:
        if not drafter_class.packs:
            raise BadInputError(
                f"training.packing: a {name} drafter's loss does not keep the texts of a row apart; leave out "
                f"training.packing, or take one of these: {able_drafters('packs')}."
            )
        if spec.on_policy:
            raise BadInputError(
                "training.packing: with data.on_policy each row is one text; leave out training.packing."
            )


def able_drafters(ability: str) -> str:
    """Return the types of drafters that can do it, for a sentence."""
    return ", ".join(name for name, known in HEADS.items() if getattr(known, ability))


def make_drafter(values: dict[str, Any], target: Target, token_counts: Callable[[], Tensor]) -> Drafter:
    """Return the drafter of a recipe's `drafter:` section, in fp32, ready to be trained.

    `token_counts` gives how often each token is to be predicted, `[V]`; it is called for a new drafter alone.

    Raises:
        BadInputError: see `check_drafter`; or `init` and another setting contradict each other.
        IncompatibleError: the saved drafter does not fit the target.
    """
    if not is_warm(values):
        drafter_class, config = drafter_config(values)
        return drafter_class.build(config, target, token_counts()).float()
    drafter = load_drafter(warm_folder(values), target, torch.float32)
    _apply(drafter, {k: v for k, v in values.items() if k not in ("init", "type")}, target)
    return drafter


def made_for(recipe: Recipe, target: Target, token_counts: Callable[[], Tensor]) -> Drafter:
    """Return a recipe's drafter, checked against its target; refuse what a library does, and one without weights."""
    try:
        drafter = make_drafter(recipe.drafter, target, token_counts)
        check_made(drafter, target)
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except LIBRARY_ERRORS as error:
        raise BadInputError(f"drafter: such a one cannot be made for this target ({reason(error)}).") from error
    return drafter


def check_made(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that cannot draft for the target, or has nothing to train: with its contents or without."""
    drafter.check(target)
    if not any(p.requires_grad for p in drafter.parameters()):
        raise BadInputError(
            f"drafter: a {drafter.name} of these settings has no weights of its own: there is nothing to train."
        )


def check_makes(recipe: Recipe, target: Target) -> Drafter:
    """Return a drafter made as if every token were as frequent: data cannot save one that cannot be made."""
    return made_for(recipe, target, lambda: torch.zeros(target.vocab_size, dtype=torch.long))


def warm_folder(values: dict[str, Any]) -> Path:
    """Return the folder with a drafter's config.json: `init` itself, or its `drafter/` (a run's output, a pair)."""
    init, words = values["init"], init_words(values)
    wanted = f"{', '.join(words)}, or a folder" if words else "a folder"
    if not isinstance(init, str):
        raise BadInputError(f"drafter.init: expected {wanted}, found {init!r}.")
    folder = Path(init).expanduser()
    for candidate in (folder / "drafter", folder):
        if (candidate / CONFIG).is_file():
            return candidate
    raise BadInputError(
        f"drafter.init: no drafter at {init!r}: there is no {CONFIG}. Give {wanted} that a training wrote, e.g. "
        "runs/name/drafter."
    )


def _apply(drafter: Drafter, given: dict[str, Any], target: Target) -> None:
    """Set what may change; refuse what contradicts the saved weights."""
    wanted = type(drafter.config).from_dict(given)
    wanted = wanted.completed(target) if hasattr(wanted, "completed") else wanted
    for name in (name for name in given if name not in _PAST):
        ours, theirs = getattr(wanted, name), getattr(drafter.config, name)
        if name in FREE:
            if ours != theirs:
                _log.info(
                    "drafter.%s: the drafter in drafter.init learned with %s, and goes on with %s", name, theirs, ours
                )
            setattr(drafter.config, name, ours)
            continue
        if name == "model":  # a draft model is saved as a plain checkpoint: its sizes are in that config
            theirs = {key: getattr(drafter.model.config, key, None) for key in ours}  # type: ignore[union-attr]
        if ours != theirs:
            raise BadInputError(
                f"drafter.{name}: the drafter in drafter.init was made with {theirs!r}, the recipe says {ours!r}; "
                "leave it out, or leave out init."
            )
