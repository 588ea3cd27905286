"""`outrider pair …`: pairs made, shown, verified and signed, and their versions in a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from ..common import BadInputError
from ..common.atomic import require_folder
from .options import Adapter, AsJson, Overrides, PairFolder, RecipeName, recipe_of
from .output import console_for, tell

if TYPE_CHECKING:
    from ..eval.tuning import Tuning
    from ..pair import Pair
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


def register(pair_app: typer.Typer) -> None:
    """Add these verbs to `outrider pair`."""
    for verb in (new, show, verify, sign, push, pull, log, diff):
        pair_app.command(name=verb.__name__)(verb)


# ------------------------------------------------------------ a pair


def new(
    folder: Annotated[Path, typer.Argument(help="Where the pair goes.")],
    recipe: RecipeName,
    changes: Overrides = None,
    drafter: Annotated[
        Path | None, typer.Option(help="A saved drafter (default: what the recipe's training left).")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A report's folder (default: the run's, if there is one).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bind target, drafter and measurements into one versioned folder."""
    loaded = recipe_of(recipe, changes)
    require_folder(folder, "the pair")
    from ..pair import new_pair
    from .eval_setup import load_target, report_folder, trained_drafter
    from .json_output import PairBody, say

    console = console_for(as_json)
    target = load_target(loaded)
    bound = trained_drafter(loaded, target, drafter)
    default = report_folder(recipe, changes or [], other=None if drafter is None else bound)
    measured = report or (default if default.is_dir() else None)
    if measured is None:
        console.print(
            f"no report in {escape(str(default))}: this pair holds no figures. `outrider eval` with the same words "
            "measures them; --report names another one."
        )
    made = new_pair(folder, target, bound, loaded, measured, console=console)
    print_pair(made, console)
    if as_json:
        say("pair-new", PairBody.of(made))


def show(
    folder: PairFolder,
    as_json: Annotated[bool, typer.Option("--json", help="The whole of pair.json, as it is.")] = False,
) -> None:
    """What a pair is, where it comes from, and what it achieved."""
    from ..pair import Pair

    pair = Pair.load(folder)
    if as_json:
        tell(pair.manifest.to_text())
    else:
        print_pair(pair, Console())


def verify(
    folder: PairFolder,
    target: Annotated[str | None, typer.Option(help="Compare this target's content too.")] = None,
    adapter: Adapter = None,
    signer: Annotated[
        Path | None, typer.Option(help="Must be signed with this public key, or one of an allowed_signers file.")
    ] = None,
    identity: Annotated[
        str | None, typer.Option(help="Of an allowed_signers file, only the keys of this name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, and check the signature. Exit code 1 if anything differs, and what."""
    from ..pair import Pair
    from ..pair import verify as altered_files
    from .json_output import say

    differences = altered_files(folder)
    if target is not None and not differences:  # an altered pair.json cannot be asked how to load a target
        differences = altered_files(folder, Pair.load(folder).load_target(target, adapter=adapter))
    found: str | None = None
    if signer is not None and not differences:
        from ..pair.signature import check_signature

        signed_by, problem = check_signature(folder, signer, identity)
        found = None if signed_by is None else f"{signed_by.name}, {signed_by.fingerprint}"
        differences = [problem] if signed_by is None else []
    code = 1 if differences else 0
    if as_json:
        body = {"folder": str(folder), "intact": not differences, "differences": differences, "signer": found}
        say("pair-verify", body, code)
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in differences or [f"{folder} is intact" + ("" if found is None else f", signed by {found}")]:
            console.print(("[red]✗[/red] " if differences else "[green]✓[/green] ") + escape(line))
    if code:
        raise typer.Exit(code)


def sign(
    folder: PairFolder,
    key: Annotated[Path, typer.Option(help="A private key of OpenSSH, or the public half of one in ssh-agent.")],
) -> None:
    """Sign a pair with ssh-keygen, so that others can tell who made it: pair.json.sig."""
    from ..pair import verify as altered_files
    from ..pair.manifest import SIGNATURE
    from ..pair.signature import sign as sign_pair

    altered = altered_files(folder)
    if altered:
        raise BadInputError(f"{folder} was altered after it was made, and is not signed: {'; '.join(altered)}.")
    fingerprint = sign_pair(folder, key)
    Console(highlight=False, soft_wrap=True).print(escape(f"signed with {fingerprint}: {folder / SIGNATURE}"))


def print_pair(pair: Pair, console: Console) -> None:
    manifest = pair.manifest
    source, parent = manifest.target.source, manifest.lineage.parent
    rows = {
        "pair": f"{pair.name} version {pair.version}",
        "identity": pair.digest,
        "target": " + ".join(filter(None, (source.path or "given in memory", source.adapter)))
        + f" ({pair.dtype}, {pair.fingerprint().digest[:12]}…)",
        "drafter": f"{manifest.drafter.type}, {pair.plan}, rule {pair.plan.verify}",
        "lineage": manifest.lineage.reason
        + (f" (parent: version {parent.version}, {parent.digest[:12]}…)" if parent else ""),
        "made": f"{manifest.created} with outrider {manifest.outrider_version}",
        "folder": str(pair.folder),
    }
    for headline in manifest.measurements.headline:
        tau, speedup = (figure.text("not measured") for figure in (headline.tau, headline.speedup))
        rows[f"temperature {headline.temperature:g}"] = f"τ {tau}   speedup {speedup}"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in [*rows.items(), *_tuned_rows(manifest.tuning)]:
        table.add_row(name, escape(value))
    console.print(table)


def _tuned_rows(tunings: list[Tuning]) -> Iterator[tuple[str, str]]:
    for tuning in tunings:
        where = f"temperature {tuning.temperature:g}, {tuning.dtype} on {tuning.device_name}, {tuning.created}"
        for found in tuning.batches:
            yield "tuned", f"batch {found.batch_size}, {found} ({where})"


# ------------------------------------------------------------ pairs in a registry


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
