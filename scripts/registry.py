"""`outrider pair push | pull | log | diff`: versions of pairs in a registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from ..common import BadInputError
from .output import console_for

if TYPE_CHECKING:
    from ..pair.comparison import Side, VersionNode
    from ..pair.registry import Registry

RegistryPlace = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="OUTRIDER_REGISTRY",
        help="A folder, hf://ORG/REPOSITORY or wandb://[ENTITY/]PROJECT.",
    ),
]
PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


def register(pair_app: typer.Typer) -> None:
    """Add these verbs to `outrider pair`."""
    for name, verb in (("push", push), ("pull", pull), ("log", log), ("diff", diff)):
        pair_app.command(name=name)(verb)


def push(pair: PairFolder, registry: RegistryPlace = None, as_json: AsJson = False) -> None:
    """Add a pair to a registry, all of it or nothing; a second time changes nothing."""
    from ..pair import Pair
    from .json_output import PushBody, say

    console = console_for(as_json)
    opened, loaded = _opened(registry), Pair.load(pair)
    entry = opened.push(loaded, console)
    console.print(f"[bold]{entry}[/bold] (revision {entry.revision}) is in {escape(opened.store.where)}")
    if as_json:
        say("pair-push", PushBody.of(opened, entry, loaded))


def pull(
    version: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The newest version, or that one.")],
    folder: Annotated[Path, typer.Argument(help="Where the pair goes.")],
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """Write a version from a registry into a folder; every byte is verified."""
    from ..pair.registry import PairReference
    from .json_output import PairBody, say

    console = console_for(as_json)
    pair = _opened(registry).pull(PairReference.parse(version), folder.expanduser(), console)
    console.print(f"{pair.name} version {pair.version}: [bold]{escape(str(pair.folder))}[/bold], intact")
    if as_json:
        say("pair-pull", PairBody.of(pair))


def log(
    name: Annotated[str | None, typer.Argument(help="Only the pair of this name.")] = None,
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """The versions in a registry, each after the one that it was made from, with their τ."""
    from ..pair.comparison import lineage
    from .json_output import LogBody, say

    opened = _opened(registry)
    versions = opened.versions(name)
    if as_json:
        say("pair-log", LogBody.of(opened, versions))
        return
    console = Console(highlight=False)
    tree = Tree(escape(opened.store.where))
    for node in lineage([version.manifest for version in versions]):
        _draw(node, tree)
    console.print(tree)
    if not versions:
        console.print("no versions yet; `outrider pair push` adds one", style="dim")


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A pair's folder, or NAME[@VERSION] of the registry.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same of the other pair.")],
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """What differs between two pairs: target, tokenizer, drafter, recipe, data, τ."""
    from ..pair.comparison import compare
    from .json_output import say

    sides = [_side(reference, registry) for reference in (one, other)]
    found = compare(*sides)
    if as_json:
        digests = [side.manifest.digest for side in sides]
        say("pair-diff", {"one": digests[0], "other": digests[1], "differences": found})
        return
    console = Console(highlight=False, soft_wrap=True)
    for part, lines in found.items():
        console.print(f"[bold]{'τ' if part == 'tau' else part}[/bold]" + ("" if lines else " [dim]the same[/dim]"))
        for line in lines:
            console.print(f"  {escape(line)}")


def _opened(where: str | None) -> Registry:
    from ..pair.registry import open_registry

    if where is None:
        raise BadInputError("which registry? Give --registry, or set OUTRIDER_REGISTRY.")
    return open_registry(where)


def _side(reference: str, where: str | None) -> Side:
    """Return the pair in a folder, or a version of the registry."""
    from ..pair import Pair
    from ..pair.comparison import Side
    from ..pair.registry import PairReference

    folder = Path(reference).expanduser()
    if folder.is_dir() or where is None:
        return Side(Pair.load(folder).manifest, lambda name: _text(folder / name))
    opened = _opened(where)
    version = opened.version(PairReference.parse(reference))
    return Side(version.manifest, lambda name: opened.text(version, name))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _draw(node: VersionNode, tree: Tree) -> None:
    from ..pair.comparison import headline_text

    waiting = [(node, tree)]
    while waiting:
        here, branch = waiting.pop(0)
        manifest = here.manifest
        figures = "; ".join(map(headline_text, manifest.measurements.headline)) or "not measured"
        parent = f"; from {here.missing}, which is not here" if here.missing else ""
        line = f"[bold]{escape(manifest.name)}@{manifest.version}[/bold] {escape(figures)}"
        why = f"{manifest.drafter.type}, {manifest.lineage.reason}{parent}; {manifest.created}, {manifest.digest[:12]}…"
        grown = branch.add(f"{line}\n[dim]{escape(why)}[/dim]")
        waiting += [(child, grown) for child in here.children]
