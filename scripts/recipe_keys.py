"""`outrider recipe`: the keys of a recipe, explained from the schema itself, and the page of all of them.

    python -m outrider.scripts.recipe_keys > docs/reference/recipe-keys.md

What is typed in `recipes.schema` needs no torch. Keys of `drafter` and `training` belong to the drafters' configs and
to `transformers.TrainingArguments`, which are imported when they are asked for.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.errors import did_you_mean
from ..common.places import require_file
from ..common.untrusted_files import YAML, read_text
from ..common.values import in_words
from ..recipes import load_recipe, recipe_file
from ..recipes.schema import Recipe, Section, alternatives, is_section, nearest_key
from .options import Overrides, recipes_like
from .output import print_lines

_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}  # of JSON Schema


@dataclass(frozen=True)
class RecipeKey:
    """A key of a recipe: its dotted path, its type with allowed values, its default ("" of a section), its meaning."""

    path: str
    kind: str
    default: str
    meaning: str


# The words of TRL beside the fields of TrainingArguments.
_TRL = {
    "packing": RecipeKey("training.packing", "true or false", "False", "rows are packs of several texts."),
    "max_length": RecipeKey(
        "training.max_length", "an integer or null", "None", "tokens of a pack; null: the longest row's."
    ),
}


def explain(path: str) -> list[RecipeKey]:
    """Return the key at a dotted path, and all keys below it. BadInputError names the nearest known key."""
    section, _, name = path.partition(".")
    if section == "drafter" and name:
        return _of_drafters(name)
    if section == "training" and name:
        return [_of_training(name)]
    keys = [key for key in typed_keys() if key.path == path or key.path.startswith(f"{path}.")]
    if not keys:
        raise BadInputError(f"unknown key {path}; {nearest_key(tuple(path.split('.')))}")
    return keys


def typed_keys(form: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[RecipeKey]:
    """Yield every key that the schema knows, each section before its own keys."""
    properties = form.model_json_schema()["properties"]
    for name, field in form.model_fields.items():
        kinds = alternatives(field.annotation)
        words = " or ".join("a section" if is_section(kind) else in_words(kind) for kind in kinds)
        for part in (properties[name], *properties[name].get("anyOf", ())):
            words += "".join(f" {sign} {part[limit]}" for limit, sign in _LIMITS.items() if limit in part)
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else "" if isinstance(value, Section) else json.dumps(value)
        yield RecipeKey(prefix + name, words, default, _meaning(form, name))
        for kind in kinds:
            members = alternatives(get_args(kind)[0]) if get_origin(kind) is list else (kind,)
            for section in filter(is_section, members):
                yield from typed_keys(section, f"{prefix}{name}.")


def _meaning(form: type, name: str) -> str:
    """Return the description of an attribute, by the docstrings of its class and of those that it is made from."""
    for known in form.__mro__:
        _, _, attributes = inspect.cleandoc(known.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(attributes)):
            names, _, text = entry.partition(":")
            if name in names.split(", "):
                return " ".join(text.split())
    return ""


def _of_drafters(name: str) -> list[RecipeKey]:
    """Return the setting as each type of drafter has it; "type" is what makes one."""
    from ..heads import HEADS

    known = {kind: head.config_class for kind, head in HEADS.items() if head.trainable}
    if name == "type":
        meaning = "the architecture; docs/guides/choosing-a-method.md compares them."
        return [RecipeKey("drafter.type", f"one of {', '.join(map(repr, sorted(known)))}", "required", meaning)]
    keys = [key for kind, form in known.items() for key in _settings(form, kind) if key.path.endswith(f".{name}")]
    if not keys:
        near = did_you_mean(name, {f.name for form in known.values() for f in fields(form)})
        raise BadInputError(f"unknown key drafter.{name}; {near}known types: {', '.join(sorted(known))}.")
    return keys


def _settings(form: type, kind: str) -> Iterator[RecipeKey]:
    assert is_dataclass(form)
    hints = get_type_hints(form)
    for one in fields(form):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        allowed = ", ".join(map(repr, getattr(form, "words", {}).get(one.name, ())))
        shown = "required" if default is MISSING else json.dumps(default)
        meaning = _meaning(form, one.name) or ("" if default != 0 else "as the target's.")
        words = f"one of {allowed}" if allowed else in_words(hints[one.name])
        yield RecipeKey(f"{kind}.{one.name}", words, shown, meaning)


def _of_training(name: str) -> RecipeKey:
    from transformers import TrainingArguments

    known = {f.name: f for f in fields(TrainingArguments) if f.init}
    if name in _TRL:
        return _TRL[name]
    if name not in known:
        raise BadInputError(
            f"unknown key training.{name}; {did_you_mean(name, [*known, *_TRL])}see transformers.TrainingArguments."
        )
    default = known[name].default
    said = re.search(rf"^ +{name} \(.*\n((?: {{12,}}.*\n)+)", TrainingArguments.__doc__ or "", flags=re.MULTILINE)
    meaning = " ".join(said[1].split()) if said else "a field of transformers.TrainingArguments."
    kind = in_words(get_type_hints(TrainingArguments)[name])
    return RecipeKey(f"training.{name}", kind, "" if default is MISSING else str(default), meaning)


def recipe(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", autocompletion=recipes_like, help="A recipe to print whole, with every default."
        ),
    ] = None,
    changes: Overrides = None,
    key: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="A key or a section, such as eval.repeats or data.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Copy the recipe's own file to this new one, comments and all, to change it.")
    ] = None,
) -> None:
    """A recipe with every default written out; or what a key means.

    Of a key: its meaning, its type, its default and its allowed values.
    """
    if key is not None:
        for one in explain(key):
            default = f", default {one.default}" if one.default not in ("", "required") else ""
            required = ", required" if one.default == "required" else ""
            lines = [f"[bold]{escape(one.path)}[/bold]: {escape(one.kind + default + required)}"]
            print_lines([*lines, f"    {escape(one.meaning)}"] if one.meaning else lines)
        return
    if name is None:
        raise BadInputError("which recipe? Give its file or its name; or --explain KEY, to read what a key means.")
    if out is not None:
        if changes:
            raise BadInputError("--out copies a recipe as it stands; make the changes in the copy.")
        require_file(out, "the recipe")
        text = read_text(recipe_file(name), YAML.num_bytes)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text)
        print_lines([f"[green]✓[/green] {escape(f'{out}: a copy of {name}; give it a name of its own')}"])
        return
    from ..heads.registry import with_defaults

    with redirect_stdout(sys.stderr):  # importing it, transformers says on stdout that WANDB_MODE is offline
        from ..train.arguments import check_training

    found = load_recipe(name, changes or [])
    check_training(found.training)
    print_lines([escape(found.to_yaml(drafter=with_defaults(found.drafter)).rstrip())])


_HEADER = """\
# All keys of a recipe

Made from the schema by `python -m outrider.scripts.recipe_keys`; `outrider recipe --explain KEY` prints one of them.
A key without a default is a section, or belongs to one that may be left out. `training` takes any field of
`transformers.TrainingArguments` (`outrider recipe --explain training.warmup_steps`), and two of TRL's: `packing` and
`max_length`, the length of a pack.
"""


def page() -> str:
    """Return the page of all keys, in Markdown: those of the schema, then those of each type of drafter."""
    from ..heads import HEADS

    known = list(typed_keys())
    parts = [_HEADER, _table("Keys", known)]
    for kind, head in sorted(HEADS.items()):
        if head.trainable:
            keys = [replace(k, path=f"drafter{k.path[len(kind) :]}") for k in _settings(head.config_class, kind)]
            parts.append(_table(f"drafter.type: {kind}", keys))
    return "\n".join(parts)


def _table(title: str, keys: list[RecipeKey]) -> str:
    rows = [(f"`{key.path}`", key.kind, key.default and f"`{key.default}`", key.meaning) for key in keys]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
