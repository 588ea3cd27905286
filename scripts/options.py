"""Options that several verbs share, and verbs whose options come in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from ..recipes import Recipe

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a packaged recipe such as embedded-eagle3.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, e.g. training.max_steps=50."),
]
PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's folder.")]
NewTarget = Annotated[str, typer.Option("--target", help="The changed target: a folder, a Hub id, or 'embedded'.")]
Adapter = Annotated[str | None, typer.Option(help="A PEFT adapter that changed the target.")]
Quantize = Annotated[
    str | None, typer.Option(help="int8 or int8-dynamic: the target's weights are quantised so, by torchao.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


def checked_temperatures(asked: Any) -> Any:
    """Return the temperatures of an option, refused before anything is loaded."""
    from ..common.values import TEMPERATURES, is_temperature

    for value in asked if isinstance(asked, list) else [asked or 0.0]:
        if not is_temperature(value):
            raise typer.BadParameter(f"expected {TEMPERATURES}, found {value:g}.")
    return asked


Temperature = Annotated[float, typer.Option(callback=checked_temperatures)]


def recipe_of(name: str, changes: list[str] | None) -> Recipe:
    """Return the recipe that a verb was given, with its changes."""
    from ..recipes import load_recipe

    return load_recipe(name, changes or [])


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` as the command line sees it, with the fields of its dataclasses as options of their own.

    A field is annotated as an option is: `depth: Annotated[int | None, typer.Option(min=1)] = None`. Names must differ
    between the groups, and every field has a default.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}

    @wraps(verb)
    def called(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**given, **made)

    parameters = [p for one in inspect.signature(verb).parameters.values() for p in _flat(one, hints, groups)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _flat(one: inspect.Parameter, hints: dict[str, Any], groups: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield a parameter, or those that its dataclass stands for."""
    kind = inspect.Parameter.KEYWORD_ONLY
    if one.name not in groups:
        yield one.replace(kind=kind, annotation=hints[one.name])
        return
    annotations = get_type_hints(groups[one.name], include_extras=True)
    for field in fields(groups[one.name]):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        yield inspect.Parameter(field.name, kind, default=default, annotation=annotations[field.name])
