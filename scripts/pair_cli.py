"""`outrider pair …`, probe and refresh: pairs made, shown, signed, kept in a registry, and held to changed targets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from ..common import BadInputError
from ..common.places import PAIR, REFRESH, require_place
from ..common.terminal import VisibleConsole
from ..common.untrusted_files import MEGABYTE, read_bytes
from . import data_cli, dry_runs
from .options import (
    Adapter,
    AsJson,
    Identity,
    NewTarget,
    Overrides,
    PairFolder,
    Quantize,
    RecipeName,
    Signers,
    pair_of,
    pairs_like,
    recipe_of,
)
from .output import console_for, finish, print_facts, print_lines, tell

if TYPE_CHECKING:
    from ..pair import PairFiles
    from ..pair.comparison import Side, VersionNode
    from ..pair.registry import Registry

RegistryPlace = Annotated[
    str | None,
    typer.Option(
        "--registry", envvar="OUTRIDER_REGISTRY", help="A folder, hf://ORG/REPOSITORY or wandb://[ENTITY/]PROJECT."
    ),
]


pair_app = typer.Typer(no_args_is_help=True, help="Make, show, verify, sign, publish and compare pairs.")


@pair_app.command()
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
    require_place(folder, PAIR, what="the pair")
    from ..heads import load_drafter
    from ..pair import new_pair
    from .eval_setup import load_target, report_folder, require_own_target, trained_drafter
    from .json_schemas import pair_fields

    console = console_for(as_json)
    saved = drafter or trained_drafter(loaded)
    target = load_target(loaded)
    require_own_target(loaded, saved, target)
    bound = load_drafter(saved, target)
    default = report_folder(recipe, changes or [], drafter=None if drafter is None else bound)
    measured = report or (default if default.is_dir() else None)
    if measured is None:
        console.print(
            f"no report in {escape(str(default))}: this pair holds no figures. `outrider eval` with the same words "
            "measures them; --report names another one."
        )
    made = new_pair(folder, target, saved, loaded, measured, console=console)
    print_pair(made, console)
    finish(as_json, "pair-new", pair_fields(made))


@pair_app.command()
def show(
    folder: PairFolder,
    as_json: Annotated[bool, typer.Option("--json", help="The whole of pair.json, as it is.")] = False,
) -> None:
    """What a pair is, where it comes from, and what it achieved."""
    from ..pair import PairFiles

    pair = PairFiles.load(folder)
    if as_json:
        tell(pair.manifest.to_text())
    else:
        print_pair(pair, VisibleConsole())


@pair_app.command()
def verify(
    folder: PairFolder,
    target: Annotated[str | None, typer.Option(help="Compare this target's content too.")] = None,
    adapter: Adapter = None,
    signer: Signers = None,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, and check the signature. Exit code 1 if anything differs, and what."""
    from ..pair import verify as altered_files

    differences = altered_files(folder)
    if target is not None and not differences:  # an altered pair.json cannot be asked how to load a target
        differences = altered_files(folder, pair_of(folder).load_target(target, adapter=adapter))
    found: str | None = None
    if signer is not None and not differences:
        from ..pair.manifest import MANIFEST
        from ..pair.signature import check_signature

        signed_by, problem = check_signature(folder / MANIFEST, signer, identity)
        found = None if signed_by is None else f"{signed_by.name}, {signed_by.fingerprint}"
        differences = [problem] if signed_by is None else []
    lines = [f"[red]✗[/red] {escape(line)}" for line in differences]
    intact = f"{folder} is intact" + ("" if found is None else f", signed by {found}")
    body = {"folder": str(folder), "intact": not differences, "differences": differences, "signer": found}
    show_lines = lines or [f"[green]✓[/green] {escape(intact)}"]
    finish(as_json, "pair-verify", body, int(bool(differences)), lambda: print_lines(show_lines))


@pair_app.command()
def sign(
    folder: PairFolder,
    key: Annotated[Path, typer.Option(help="A private key of OpenSSH, or the public half of one in ssh-agent.")],
) -> None:
    """Sign a pair with ssh-keygen, so that others can tell who made it: pair.json.sig."""
    from ..pair import verify as altered_files
    from ..pair.manifest import MANIFEST, SIGNATURE
    from ..pair.signature import sign as sign_file

    altered = altered_files(folder)
    if altered:
        raise BadInputError(f"{folder} was altered after it was made, and is not signed: {'; '.join(altered)}.")
    print_lines([escape(f"signed with {sign_file(folder / MANIFEST, key)}: {folder / SIGNATURE}")])


def probe(
    pair: PairFolder,
    target: NewTarget,
    adapter: Adapter = None,
    quantize: Quantize = None,
    template: data_cli.Template = None,
    as_json: AsJson = False,
) -> None:
    """Is the pair still right for a changed target?

    Exit code 0: fresh, 1: stale, 3: incompatible.
    """
    loaded, asked = pair_of(pair), data_cli.arguments(template)
    from ..pair import probe as run

    console = console_for(as_json)
    changed = loaded.load_target(target, adapter=adapter, quantize=quantize)
    arguments = None if asked is None else loaded.recipe().template | asked
    result = run(loaded, changed, console=console, template=arguments)
    colour = {"fresh": "green", "stale": "yellow", "incompatible": "red"}[result.verdict]
    lines = [f"[bold {colour}]{result.verdict}[/bold {colour}]", *map(escape, result.lines)]
    body = {"pair": loaded.digest, "target": changed.fingerprint().digest, **vars(result)}
    finish(as_json, "probe", body, result.exit_code, lambda: print_lines(lines))


def refresh(
    pair: PairFolder,
    target: NewTarget,
    out: Annotated[Path, typer.Option(help="Working folder of the refresh; the next version is OUT/pair.")],
    changes: Overrides = None,
    adapter: Adapter = None,
    quantize: Quantize = None,
    low_rank: Annotated[
        int | None, typer.Option(min=1, help="Learn a change of this rank instead of all weights (LoRA).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Train for so long, not for the recipe's steps.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="End after learning from so many tokens.")] = None,
    until_flat: Annotated[
        float | None,
        typer.Option(min=0, max=0.5, help="End when held-out τ rises by less than this share, such as 0.01."),
    ] = None,
    dry_run: dry_runs.DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train the drafter on for a changed target: the next version."""
    loaded = pair_of(pair)
    from ..pair.refresh import RefreshOptions
    from ..pair.refresh import refresh as run
    from ..train.stopping import Until
    from .json_schemas import pair_fields

    require_place(out, REFRESH, what="the refresh")
    if dry_run:
        return dry_runs.of_refresh(loaded, target, adapter, out, changes or [], seconds).tell(as_json)
    console = console_for(as_json)
    until = None if tokens is None and until_flat is None else Until(tokens, until_flat)
    changed = loaded.load_target(target, adapter=adapter, quantize=quantize)
    made = run(loaded, changed, out, changes or [], console, RefreshOptions(low_rank, seconds, until))
    print_pair(made, console)
    finish(as_json, "refresh", pair_fields(made))


def print_pair(pair: PairFiles, console: Console) -> None:
    from ..pair.comparison import tuned_plans

    manifest = pair.manifest
    source, parent = manifest.target.source, manifest.lineage.parent
    fingerprint, plan = manifest.target.fingerprint, manifest.plan.restored()
    precision = ", ".join(dict.fromkeys((manifest.target.precision, fingerprint.dtype)))
    rows = {
        "pair": f"{pair.name} version {pair.version}",
        "identity": f"{pair.digest[:12]}… (whole: pair show --json)",
        "target": " + ".join(filter(None, (source.path or "given in memory", source.adapter)))
        + f" ({precision}, {fingerprint.digest[:12]}…)",
        "drafter": f"{manifest.drafter.type}, {plan}, rule {plan.verify}",
        "lineage": manifest.lineage.reason
        + (f" (parent: version {parent.version}, {parent.digest[:12]}…)" if parent else ""),
        "made": f"{manifest.created} with outrider {manifest.outrider_version}",
        "folder": str(pair.folder),
    }
    for headline in manifest.measurements.headline:
        tau, speedup = (figure.text("not measured") for figure in (headline.tau, headline.speedup))
        rows[f"temperature {headline.temperature:g}"] = f"τ {tau}   speedup {speedup}"
    facts = list(rows.items())
    facts += [("tuned", plan) for plan in tuned_plans(manifest)]
    print_facts(((name, escape(value)) for name, value in facts), console)


@pair_app.command()
def push(
    pair: PairFolder, registry: RegistryPlace = None, dry_run: dry_runs.DryRun = False, as_json: AsJson = False
) -> None:
    """Add a pair to a registry, all of it or nothing; a second time changes nothing."""
    from ..pair import PairFiles

    console = console_for(as_json)
    opened, loaded = opened_registry(registry), PairFiles.load(pair)
    if dry_run:
        return dry_runs.of_push(loaded, opened.store.where).tell(as_json)
    entry = opened.push(loaded, console)
    there = f"waits for `{waiting}`, which sends it to" if (waiting := opened.store.waiting) else "is in"
    where = f"{there} {opened.store.where}"
    console.print(f"[bold]{escape(str(entry))}[/bold] (revision {entry.revision}) {escape(where)}")
    finish(as_json, "pair-push", {"registry": opened.store.where, "digest": loaded.digest, **vars(entry)})


@pair_app.command()
def pull(
    version: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The newest version, or that one.")],
    folder: Annotated[Path, typer.Argument(help="Where the pair goes.")],
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """Write a version from a registry into a folder; every byte is verified."""
    from ..pair.registry import PairReference
    from .json_schemas import pair_fields

    console = console_for(as_json)
    pair = opened_registry(registry).pull(PairReference.parse(version), folder.expanduser(), console)
    console.print(f"{escape(pair.name)} version {pair.version}: [bold]{escape(str(pair.folder))}[/bold], intact")
    finish(as_json, "pair-pull", pair_fields(pair))


@pair_app.command()
def log(
    name: Annotated[str | None, typer.Argument(help="Only the pair of this name.")] = None,
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """The versions in a registry, each after the one that it was made from, with their τ."""
    from ..pair.comparison import lineage
    from .json_schemas import version_fields

    opened = opened_registry(registry)
    versions = opened.versions(name)
    if not as_json:
        console, tree = VisibleConsole(highlight=False), Tree(escape(opened.store.where))
        for node in lineage([version.manifest for version in versions]):
            _draw(node, tree)
        console.print(tree)
        if not versions:
            there = sorted({version.manifest.name for version in opened.versions()})
            lacking = f"no pair called {name!r}; there are {', '.join(there)}" if there else "no versions yet"
            console.print(escape(f"{lacking}; `outrider pair push` adds one"), style="dim")
    body = {"registry": opened.store.where, "versions": [version_fields(version) for version in versions]}
    finish(as_json, "pair-log", body)


@pair_app.command()
def diff(
    one: Annotated[
        str,
        typer.Argument(
            metavar="A", autocompletion=pairs_like, help="A pair's folder, or NAME[@VERSION] of the registry."
        ),
    ],
    other: Annotated[str, typer.Argument(metavar="B", autocompletion=pairs_like, help="The same of the other pair.")],
    registry: RegistryPlace = None,
    as_json: AsJson = False,
) -> None:
    """What differs between two pairs: target, tokenizer, drafter, recipe, data, τ."""
    from ..pair.comparison import compare

    first, second = (side_of(reference, registry) for reference in (one, other))
    found = compare(first, second)
    lines = []
    for part, differences in found.items():
        same = "" if differences else " [dim]the same[/dim]"
        lines += [f"[bold]{'τ' if part == 'tau' else part}[/bold]{same}", *(f"  {escape(d)}" for d in differences)]
    body = {"one": first.manifest.digest, "other": second.manifest.digest, "differences": found}
    finish(as_json, "pair-diff", body, show=lambda: print_lines(lines))


def opened_registry(where: str | None) -> Registry:
    """Return the registry at a place; BadInputError if none is named."""
    from ..pair.registry import open_registry

    if where is None:
        raise BadInputError("which registry? Give --registry, or set OUTRIDER_REGISTRY.")
    return open_registry(where)


def side_of(reference: str, where: str | None) -> Side:
    """Return the pair in a folder, or a version of the registry."""
    from ..pair import PairFiles
    from ..pair.comparison import Side
    from ..pair.registry import PairReference

    folder = Path(reference).expanduser()
    if folder.is_dir() or where is None:
        return Side(PairFiles.load(folder).manifest, lambda name: _text(folder / name))
    opened = opened_registry(where)
    version = opened.version(PairReference.parse(reference))
    return Side(version.manifest, lambda name: opened.text(version, name))


def _text(file: Path) -> str:
    return read_bytes(file, 128 * MEGABYTE).decode("utf-8", "replace") if file.is_file() else ""


def _draw(node: VersionNode, tree: Tree) -> None:
    from ..pair.comparison import headline_text, tuned_plans

    waiting = [(node, tree)]
    while waiting:
        here, branch = waiting.pop(0)
        manifest = here.manifest
        figures = "; ".join(map(headline_text, manifest.measurements.headline)) or "not measured"
        parent = f"; from {here.missing}, which is not here" if here.missing else ""
        line = f"[bold]{escape(manifest.name)}@{manifest.version}[/bold] {escape(figures)}"
        why = f"{manifest.drafter.type}, {manifest.lineage.reason}{parent}; {manifest.created}, {manifest.digest[:12]}…"
        plans = "".join(f"\n  tuned: {plan}" for plan in tuned_plans(manifest))
        grown = branch.add(f"{line}{escape(plans)}\n[dim]{escape(why)}[/dim]")
        waiting += [(child, grown) for child in here.children]
