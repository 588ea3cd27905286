"""Options of a verb in groups: a parameter that is a dataclass becomes one option for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


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
