"""Options that several verbs share."""

from __future__ import annotations

from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from ..pair import Pair
    from ..recipes import Recipe

FINDING = 1
BAD_INPUT = 2
FAULT = 70  # exit codes


def recipes_like(incomplete: str) -> list[str]:
    """Return the recipes that begin so, for a shell: packaged ones, and YAML files here or in a folder."""
    from ..recipes import packaged_recipes

    files = [file for pattern in ("*.yaml", "*/*.yaml") for file in glob(escape(incomplete) + pattern)]
    return [*(name for name in packaged_recipes() if name.startswith(incomplete)), *sorted(files)]


def pairs_like(incomplete: str) -> list[str]:
    """Return the folders of pairs that begin so, for a shell, at most two levels down."""
    found = (glob(f"{escape(incomplete)}{levels}/pair.json") for levels in ("*", "*/*"))
    return sorted(file.removesuffix("/pair.json") for files in found for file in files)


def recipes_or_pairs_like(incomplete: str) -> list[str]:
    return [*recipes_like(incomplete), *pairs_like(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        autocompletion=recipes_like,
        help="A YAML file, or the name of a packaged recipe such as embedded-eagle3.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, e.g. training.max_steps=50."),
]


def named_pair(folder: Path) -> Path:
    """Return a pair's folder: `folder` itself, or that of the pair which a package registers under such a name."""
    if folder.exists() or len(folder.parts) != 1:
        return folder
    from ..common.plugins import plugin

    found = plugin("pairs", folder.name)
    return folder if found is None else Path(found)


PairFolder = Annotated[
    Path,
    typer.Argument(
        metavar="PAIR",
        autocompletion=pairs_like,
        help="A pair's folder, or the name of one in a package.",
        callback=named_pair,
    ),
]
Measured = Annotated[
    Path, typer.Argument(metavar="PAIR", autocompletion=pairs_like, help="A pair's or a report's folder.")
]
Baseline = Annotated[Path, typer.Option(autocompletion=pairs_like, help="The baseline: a pair's or a report's folder.")]
SeveralRecipes = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE... [KEY=VALUE]...",
        autocompletion=recipes_like,
        help="Recipes of one target and the same data; changes are for all.",
    ),
]
NewTarget = Annotated[
    str, typer.Option("--target", help="The changed target: a folder, a .gguf, a Hub id, 'embedded'.")
]
TargetNow = Annotated[
    str | None, typer.Option("--target", help="Where the target is now (default: where the pair says).")
]
Adapter = Annotated[str | None, typer.Option(help="A PEFT adapter that changed the target.")]
Quantize = Annotated[
    str | None, typer.Option(help="int8 or int8-dynamic: the target's weights are quantised so, by torchao.")
]
Contexts = Annotated[list[int] | None, typer.Option(min=1, help="Fill prompts up to so many tokens; may be repeated.")]
Batches = Annotated[
    list[int] | None, typer.Option(min=1, help="Also measure ragged batches of so many prompts; may be repeated.")
]
SamplingSource = Annotated[
    Literal["temperatures", "served"] | None,
    typer.Option(help="served: as the target's own generation_config.json says, penalties included."),
]
Signers = Annotated[
    Path | None,
    typer.Option("--signer", help="Must be signed with this public key, or one of an allowed_signers file."),
]
Identity = Annotated[str | None, typer.Option(help="Of an allowed_signers file, only the keys of this name.")]
Replace = Annotated[bool, typer.Option("--replace", help="Write over what is there already.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


def checked_temperatures(asked: Any) -> Any:
    """Return the temperatures of an option, refused before anything is loaded."""
    from ..common.values import TEMPERATURES, is_temperature

    for value in asked if isinstance(asked, list) else [asked or 0.0]:
        if not is_temperature(value):
            raise typer.BadParameter(f"expected {TEMPERATURES}, found {value:g}.")
    return asked


def share(text: str) -> float:
    """Return the number of a share between 0 and 1, written as `3%` or `0.03`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise typer.BadParameter(f"expected a share such as 3% or 0.03, found {text!r}.")
    return value


Temperature = Annotated[float, typer.Option(callback=checked_temperatures)]


def recipe_of(name: str, changes: list[str] | None) -> Recipe:
    """Return the recipe that a verb was given, with its changes; its target is there, if it is a folder."""
    from ..recipes import load_recipe
    from ..targets.model_folder import NAMES, gguf_in, require_local_model

    loaded = load_recipe(name, changes or [])
    path = loaded.target.path
    if path not in NAMES and "@" not in path and gguf_in(path) is None:  # PATH@SHAPE
        require_local_model(path)
    return loaded


def recipes_of(words: list[str]) -> list[Recipe]:
    """Return the recipes among the words of a verb, each with the changes (`KEY=VALUE`) among them."""
    changes = [word for word in words if "=" in word]
    return [recipe_of(word, changes) for word in words if "=" not in word]


def pair_of(folder: Path) -> Pair:
    """Return the pair in a folder. Anything else is refused before torch is imported, which takes seconds."""
    from ..pair import PairFiles

    PairFiles.load(folder)
    from ..pair import Pair

    return Pair.load(folder)
