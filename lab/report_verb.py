"""`outrider lab report`: measurements in the forms of others, files of others checked, versions over time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.locks import locked
from ..common.places import require_file
from ..scripts.options import AsJson, Identity, Replace, Signers, pairs_like
from ..scripts.output import console_for, finish, print_lines
from ..scripts.pair_cli import RegistryPlace, opened_registry, side_of

if TYPE_CHECKING:
    from ..pair.comparison import Side
    from .trend import VersionFigures

_FINDING = 1


def report(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PAIR|REPORT]...",
            autocompletion=pairs_like,
            help="Folders; with --registry, NAME of a pair there.",
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(help="modelopt, speed-bench, inferencex, vllm, markdown or card; may be repeated."),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(help="A file in one of these forms; exit code 1 if it contradicts itself, or its signature."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Sign what --to writes with the key that signed the pair.")] = None,
    signer: Signers = None,
    identity: Identity = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the first that was measured.")] = None,
    registry: RegistryPlace = None,
    out: Annotated[Path, typer.Option(help="Folder of what is written.")] = Path("runs/reports"),
    replace: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Write a measurement in the forms that others read, check such files, or draw versions over time."""
    if any(Path(subject).expanduser().is_dir() for subject in subjects or ()):
        registry = None  # of the environment, perhaps; these are folders
    if check:
        _check(check, signer, identity, as_json)
    elif to and subjects and len(subjects) == 1:
        _write_forms(subjects[0], to, temperature, out, key, replace, as_json)
    elif subjects and not to and (len(subjects) > 1 or registry):
        _write_trend(subjects, temperature, registry, out, replace, as_json)
    else:
        raise BadInputError(
            "say what is wanted: PAIR --to FORM writes a form, --check FILE checks one, and two or more pairs or "
            "reports (or NAME with --registry) give a page over time."
        )


def _check(files: list[Path], signers: Path | None, identity: str | None, as_json: bool) -> None:
    from ..pair.signature import check_signature, signature_of
    from .claims import Contradiction, contradictions
    from .report_forms import read_claims

    lines, found = [], dict[str, list[Contradiction]]()
    for file in files:
        wrong = found[str(file)] = [c for claims in read_claims(file) for c in contradictions(claims)]
        signed_by = "not signed"
        if signers is not None or signature_of(file).is_file():
            by, problem = check_signature(file, signers, identity)
            wrong += [Contradiction("signature", problem)] if by is None else []
            signed_by = "" if by is None else f"signed by {by.name or 'a key that --signer can name'}, {by.fingerprint}"
        lines += [f"[red]✗[/red] {escape(f'{file}: {c.name}: {c.line}')}" for c in wrong]
        lines += [] if wrong else [f"[green]✓[/green] {escape(f'{file}: what it says holds together; {signed_by}')}"]
    body = {"files": found}
    finish(as_json, "report-check", body, _FINDING * any(found.values()), lambda: print_lines(lines))


def _write_forms(
    subject: str, names: list[str], temperature: float | None, out: Path, key: Path | None, replace: bool, as_json: bool
) -> None:
    from ..pair import report_in
    from ..pair.signature import signature_of
    from .passport import Passport
    from .report_forms import FORMS

    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise BadInputError(f"--to {unknown[0]}: no such form; there are {', '.join(FORMS)}.")
    folder = Path(subject).expanduser()
    pair = side_of(subject, None).manifest.digest if (folder / "pair.json").is_file() else None
    passport = Passport.of(report_in(folder), temperature, pair=pair)
    written = {name: out / FORMS[name].file for name in names}
    for name, file in written.items():
        require_file(file, f"the form {name}", replace=replace)
    with locked(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, file in written.items():
            signature_of(file).unlink(missing_ok=True)
            write_atomically(file, FORMS[name].write(passport))
        signed = "not signed (--key)" if key is None else f"signed with {_sign_forms(folder, written.values(), key)}"
    body = {"files": {name: str(file) for name, file in written.items()}, "conventions": passport.conventions()}
    lines = [f"{escape(name)}: [bold]{escape(str(file))}[/bold]" for name, file in written.items()]
    finish(
        as_json, "report-forms", body, show=lambda: print_lines([*lines, escape(f"{signed}; {passport.conventions()}")])
    )


def _sign_forms(pair: Path, forms: Iterable[Path], key: Path) -> str:
    """Sign the forms of a pair with the key that signed the pair itself; return its fingerprint."""
    from ..pair import verify
    from ..pair.manifest import MANIFEST
    from ..pair.signature import check_signature, sign, signature_of

    signer, problem = check_signature(pair / MANIFEST)
    if signer is None or (problem := "; ".join(verify(pair))):
        raise BadInputError(
            f"--key signs forms of a signed pair, with the key that signed it: {problem}. `outrider pair sign {pair} "
            f"--key {key}` signs a pair."
        )
    for form in forms:
        if (used := sign(form, key)) != signer.fingerprint:
            signature_of(form).unlink()
            raise BadInputError(f"--key: {pair} is signed with {signer.fingerprint}, and {key} is {used}.")
    return signer.fingerprint


def _write_trend(
    subjects: list[str], temperature: float | None, registry: str | None, out: Path, replace: bool, as_json: bool
) -> None:
    from ..eval.reports.render import print_table
    from ..pair.manifest import Figure
    from .trend import differences, table_of, trend_html, trend_markdown

    for name in ("trend.md", "trend.html"):
        require_file(out / name, "the page", "# Versions over time|<title>[0-9]+ versions, ", replace)
    versions = _versions(subjects, temperature, registry)
    files = {"trend.md": trend_markdown(versions), "trend.html": trend_html(versions)}
    with locked(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(out / name, text)
    changes = [[], *(differences(before, after) for before, after in pairwise(versions))]
    rows = [
        {
            "version": v.label,
            "created": v.created,
            "tau": Figure.of(v.tau),
            "speedup": Figure.of(v.speedup),
            "changes": own,
        }
        for v, own in zip(versions, changes, strict=True)
    ]
    console = console_for(as_json)
    print_table(table_of(versions), None, console)
    console.print(f"report: [bold]{escape(str(out / 'trend.html'))}[/bold]")
    finish(as_json, "report-trend", {"folder": str(out), "versions": rows})


def _versions(subjects: list[str], temperature: float | None, registry: str | None) -> list[VersionFigures]:
    """Return the versions in the folders, or those of a registry's pair; what pairs differ in comes from the pairs."""
    from dataclasses import replace

    from ..pair import report_in
    from ..pair.comparison import compare
    from .trend import VersionFigures

    if registry is not None:
        sides: list[Side | None] = _sides_in(registry, subjects)
        found = [_of_manifest(side, temperature) for side in sides if side is not None]
    else:
        folders = [Path(subject).expanduser() for subject in subjects]
        sides = [side_of(str(f), None) if (f / "pair.json").is_file() else None for f in folders]
        names = [f.name if side is None else _label(side) for f, side in zip(folders, sides, strict=True)]
        labels = [n if names.count(n) == 1 else subject for n, subject in zip(names, subjects, strict=True)]
        found = [VersionFigures.of(report_in(f), label, temperature) for f, label in zip(folders, labels, strict=True)]
    for i, (one, other) in enumerate(pairwise(sides), 1):
        if one is not None and other is not None:
            told = [(part, line) for part, lines in compare(one, other).items() if part != "tau" for line in lines]
            kept = {k: v for k, v in found[i].conditions.items() if k not in ("target", "drafter")}
            changes = tuple(f"{part}: {line}" for part, line in told)
            found[i] = replace(found[i], conditions=kept, changes=changes)
    return found


def _sides_in(registry: str, names: list[str]) -> list[Side | None]:
    from functools import partial

    from ..pair.comparison import Side

    opened = opened_registry(registry)
    versions = [version for name in names for version in opened.versions(name)]
    if not versions:
        raise BadInputError(
            f"{registry} holds no versions of {', '.join(names)}; `outrider pair log` lists what it has."
        )
    ordered = sorted(versions, key=lambda v: (v.manifest.name, v.manifest.version))
    return [Side(version.manifest, partial(opened.text, version)) for version in ordered]


def _label(side: Side) -> str:
    return f"{side.manifest.name}@{side.manifest.version}"


def _of_manifest(side: Side, temperature: float | None) -> VersionFigures:
    from .trend import VersionFigures

    manifest = side.manifest
    for headline in manifest.measurements.headline:
        if temperature in (None, headline.temperature):
            conditions = {
                "data": manifest.measurements.suites,
                "machine": manifest.measurements.conditions.get("device_name"),
            }
            tau, speedup = headline.tau.interval(), headline.speedup.interval()
            return VersionFigures(_label(side), manifest.created, tau, speedup, conditions)
    raise BadInputError(f"{manifest.name}@{manifest.version} was not measured at that temperature.")
