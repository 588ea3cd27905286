"""`--dry-run`: what a verb would read, write, spend and send, told in place of doing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..common.atomic import readable_bytes
from ..common.terminal import VisibleConsole
from .output import finish, print_facts

if TYPE_CHECKING:
    from ..pair import Pair, PairFiles
    from ..recipes import Recipe
    from ..targets import Target

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be read, written, spent and sent; do nothing.")
]


@dataclass(frozen=True)
class Intent:
    """What a verb would do, in sentences."""

    reads: list[str]
    writes: list[str]
    spends: list[str]
    sends: list[str]  # away from this machine

    @classmethod
    def joined(cls, intents: Iterable[Intent]) -> Intent:
        """Return several as one, each sentence once."""
        found = [asdict(intent) for intent in intents]
        return cls(**{name: list(dict.fromkeys(s for one in found for s in one[name])) for name in found[0]})

    def tell(self, as_json: bool) -> None:
        """Answer with it, and end the verb."""
        facts = [(name, escape(line)) for name, lines in asdict(self).items() for line in lines or ["nothing"]]
        finish(as_json, "dry-run", asdict(self), show=lambda: print_facts(facts, VisibleConsole()))


def of_recipe(
    recipe: Recipe, trains: bool = True, seconds: float | None = None, sketch: Target | None = None
) -> Intent:
    """Return what distilling a recipe takes, and if it `trains`, that too: for its steps, or for `seconds`.

    `sketch`: its target without contents, where several recipes have the same.
    """
    from ..distill.responses import data_folder
    from ..distill.sources import as_specs
    from ..train.arguments import push_of, trackers, training_arguments

    data, folder = recipe.data, data_folder(recipe)
    reads = [f"the target {' with '.join(filter(None, (recipe.target.path, recipe.target.adapter)))}"]
    writes, sends = [], []
    if folder.is_dir():
        reads.append(f"the responses in {folder}, which are there already")
    else:
        reads += [f"prompts: {source.path}" for source in as_specs(data.prompts)]
        writes.append(f"responses: {folder}")
        sends += [f"prompts to {server.url}" for server in data.servers or []]
    if trains:
        writes.append(f"checkpoints, drafter and recipe: {recipe.output_folder}")
        engine, push = recipe.target.engine, push_of(recipe.training)
        sends += [f"texts to the target's engine at {url}" for url in _each(None if engine is None else engine.url)]
        sends += [f"figures to {name}" for name in trackers(training_arguments(recipe))]
        sends += [] if push is None else [f"the drafter, its recipe and a card to hf://{push.repository}"]
    return Intent(reads, writes, list(_spent(recipe, trains, seconds, sketch)), sends)


def _each(found: str | list[str] | None) -> list[str]:
    return [found] if isinstance(found, str) else found or []


def _spent(recipe: Recipe, trains: bool, seconds: float | None, sketch: Target | None) -> Iterator[str]:
    from ..train.resource_estimate import UnknownNeedsError, plan
    from .plan import sizes

    if seconds is not None:
        yield f"{seconds:g} seconds of training: {recipe.name}"
    try:
        found = sizes(plan(recipe, sketch=sketch))
    except UnknownNeedsError as error:
        yield f"an unknown amount: {error}"
        return
    kept = ("sequences", "operations", *(("training",) if seconds is None else ()), "checkpoints")
    for name in kept if trains else ("sequences",):
        yield f"{name}: {found[name]}"


def measured(recipe: Recipe) -> Iterator[str]:
    """Yield what measuring a recipe's suites takes."""
    spec = recipe.eval
    prompts = "all prompts" if spec.limit is None else f"{spec.limit} prompts"
    yield (
        f"measuring: {prompts} of each of {', '.join(spec.suites)}, {spec.repeats} times, {spec.max_new_tokens} tokens "
        f"at temperature {', '.join(f'{t:g}' for t in spec.temperatures)}"
    )


def of_comparison(recipes: list[Recipe], seconds: float, out: Path) -> Intent:
    """Return what a comparison takes. Raises as `train.compare` for recipes that cannot be compared."""
    from ..train.arguments import unpushed
    from ..train.compare import check_comparison
    from ..train.resource_estimate import sketch_target

    place = check_comparison(recipes, seconds, out)
    moved = [r.model_copy(update={"output": str(place), "training": unpushed(r.training)}) for r in recipes]
    sketch = sketch_target(recipes[0])
    each = [of_recipe(recipe, seconds=seconds, sketch=sketch) for recipe in moved]
    return Intent.joined([*each, Intent([], [f"report: {place / 'report'}"], list(measured(recipes[0])), [])])


def of_refresh(
    pair: Pair, target: str, adapter: str | None, out: Path, changes: list[str], seconds: float | None
) -> Intent:
    """Return what a refresh takes, by the configs of the changed target."""
    from ..heads import HEADS
    from ..pair.refresh import refresh_recipe
    from ..train.resource_estimate import sketch_target

    then = pair.recipe()
    spec = then.target.model_copy(update={"path": target, "revision": None, "adapter": adapter, "engine": None})
    sketch = sketch_target(then.model_copy(update={"target": spec}))
    recipe = refresh_recipe(pair, sketch, out, changes)
    shapes = {name: value for name, value in recipe.drafter.items() if name != "init"}  # as its weights have them
    recipe = recipe.model_copy(update={"target": spec, "drafter": shapes})
    after = Intent([f"the pair {pair.folder}"], [f"the next version: {out / 'pair'}"], list(measured(recipe)), [])
    trains = HEADS[pair.manifest.drafter.type].trainable  # others stay as they are
    return Intent.joined([*([of_recipe(recipe, seconds=seconds)] if trains else []), after])


def of_push(pair: PairFiles, where: str) -> Intent:
    """Return what a push takes; whether the registry has it already is not asked."""
    from ..pair.registry import open_registry

    store, sizes = open_registry(where).store, pair.manifest.sizes
    found = f"{pair.name}@{pair.version}: {len(sizes)} files, {readable_bytes(sum(sizes.values()))}"
    found = f"{found}, less what is there already, to {store.where}"
    is_folder = "://" not in where
    return Intent([f"the pair {pair.folder}"], [found] if is_folder else [], [], [] if is_folder else [found])
