"""Mutation run: how many small faults, planted one at a time by mutmut, the tests of each module notice.

    .venv/bin/python -m pip install -e ".[dev,mutation]" -c constraints.txt
    .venv/bin/python tests/mutation/mutate.py run control statistics   # named modules; all of them without a name
    .venv/bin/python tests/mutation/mutate.py show control             # who survived, as `equivalent.yaml` has them
    .venv/bin/python tests/mutation/mutate.py again control            # who survives the tests as they are now
    .venv/bin/python tests/mutation/mutate.py table                    # the scores so far

Each module is run in its own throwaway copy, `build/mutation/MODULE`, because mutmut needs the packages under the name
by which they are imported. `run` starts afresh; `run --resume` goes on where a run was stopped.

A mutant that does not change behaviour cannot be noticed. Two kinds are not counted: those listed with a reason in
`equivalent.yaml`, and those that change only the wording of a text for people (a string literal with a space in it).
mutmut changes neither decorated functions nor module constants nor slices; `plant` tries the faults of those kinds in
`planted.yaml`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "mutation"


@dataclass(frozen=True)
class Module:
    """A source file and the tests that are to notice what goes wrong in it, as paths in the checkout.

    Every mutant that survives has to sit through all of these tests, so they are few and fast. They start no processes:
    in those mutmut does not find its settings.
    """

    source: str
    tests: tuple[str, ...]


MODULES = {
    "rules": Module("decode/rules.py", ("tests/decode/test_rules.py",)),
    "round": Module(
        "decode/round.py",
        (
            "tests/decode/test_conformance.py",
            "tests/decode/test_static.py",
            "tests/decode/test_blocks.py",
            "tests/lab/test_lookahead.py",
        ),
    ),
    "session": Module(
        "heads/session.py",
        ("tests/heads/test_drafters.py", "tests/decode/test_conformance.py", "tests/decode/test_static.py"),
    ),
    "sampling": Module("decode/sampling.py", ("tests/decode/test_sampling.py",)),
    "rng": Module("decode/rng.py", ("tests/decode/test_sampling.py", "tests/decode/test_rng.py")),
    "control": Module("decode/control.py", ("tests/decode/test_control.py",)),
    "statistics": Module("eval/reports/statistics.py", ("tests/eval/reports/test_statistics.py",)),
    "figures": Module("eval/reports/figures.py", ("tests/eval/reports/test_statistics.py",)),
    "atomic": Module("common/atomic.py", ("tests/common/test_atomic.py",)),
    "gate": Module("eval/reports/gate.py", ("tests/eval/reports/test_gate.py",)),
    "divergences": Module("heads/divergences.py", ("tests/heads/test_losses.py",)),
    "losses": Module("heads/losses.py", ("tests/heads/test_losses.py",)),
    "checkpoints": Module("train/checkpoints.py", ("tests/train/test_checkpoints.py",)),
    "pair": Module("pair/pair.py", ("tests/pair/test_pair.py", "tests/pair/test_tuning.py")),
    "folder": Module("pair/folder.py", ("tests/pair/test_pair.py", "tests/pair/test_verify.py")),
    "manifest": Module("pair/manifest.py", ("tests/pair/test_manifest.py", "tests/pair/test_tuning.py")),
    "tuning": Module("eval/tuning_record.py", ("tests/eval/test_tuning_record.py", "tests/pair/test_manifest.py")),
    "calibration": Module("pair/calibration.py", ("tests/pair/test_calibration.py",)),
    "new": Module("pair/new.py", ("tests/pair/test_new.py", "tests/pair/test_pair.py")),
}


_NO_CACHES = shutil.ignore_patterns("__pycache__", "mutation")
_PLAIN = ["-p", "no:cacheprovider", "-p", "no:xdist"]  # of pytest


def run(name: str, resume: bool, sample: int | None, commit: str | None) -> None:
    """Make the copy of one module, and let mutmut try every mutant in it, or `sample` of them taken at random."""
    copy = WORK / name
    if not resume:
        shutil.rmtree(copy, ignore_errors=True)
        _make_copy(copy, MODULES[name])
        _put_tests(copy, MODULES[name], commit)
    _mutmut(copy, *(_sampled(copy, MODULES[name], sample) if sample else ()))


def again(name: str) -> None:
    """Try the mutants that survived once more, with the tests as they are now."""
    left = survivors(name)
    _put_tests(WORK / name, MODULES[name])
    _put_tests(WORK / name / "mutants", MODULES[name])
    if left:
        _mutmut(WORK / name, *(m.name for m in left))


def _make_copy(copy: Path, module: Module) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {package.split(".")[1] for package in project["tool"]["setuptools"]["packages"]}
    for package in sorted(packages):
        shutil.copytree(ROOT / package, copy / "outrider" / package, ignore=_NO_CACHES)
    (copy / "mutants").mkdir()  # Python forgets a folder of PYTHONPATH that is not there when it starts
    settings = {
        "source_paths": ["outrider"],
        "only_mutate": [f"outrider/{module.source}"],
        "pytest_add_cli_args": _PLAIN,
        "pytest_add_cli_args_test_selection": list(module.tests),
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (copy / "pyproject.toml").write_text("\n".join([text, "[tool.mutmut]", *lines, ""]), encoding="utf-8")


def _put_tests(folder: Path, module: Module, commit: str | None = None) -> None:
    """Replace the tests in `folder` by those of the checkout, or of a commit; files that came later are empty there."""
    shutil.rmtree(folder / "tests", ignore_errors=True)
    if commit is None:
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=_NO_CACHES)
    else:
        packed = subprocess.check_output(["git", "archive", commit, "tests"], cwd=ROOT)
        subprocess.run(["tar", "x", "-C", str(folder)], input=packed, check=True)
    for test in module.tests:
        (folder / test).touch()


def _mutmut(copy: Path, *mutants: str) -> None:
    """Run mutmut in the copy: one process that forks once per mutant, so torch is imported once."""
    command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", "1", *mutants]
    start = time.monotonic()
    with open(copy / "log", "a", encoding="utf-8") as log:
        variables = os.environ | _quiet(copy / "mutants")
        done = subprocess.run(command, cwd=copy, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"mutmut ended with {done.returncode}; its last words are in {copy / 'log'}.")
    with open(copy / "seconds", "a", encoding="utf-8") as file:
        file.write(f"{time.monotonic() - start:.0f}\n")


def _sampled(copy: Path, module: Module, count: int) -> list[str]:
    """Return the names of `count` mutants, the same ones at each run."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    source = Path("outrider", module.source)
    with contextlib.chdir(copy):
        names = mutate_file_contents(str(source), source.read_text(encoding="utf-8")).mutant_names
    names = [get_mutant_name(source, name) for name in names]
    return random.Random(0).sample(names, min(count, len(names)))


def plant(name: str) -> None:
    """Try every fault of `planted.yaml` in one module; says which went unnoticed."""
    copy = WORK / "planted"
    shutil.rmtree(copy, ignore_errors=True)
    _make_copy(copy, MODULES[name])
    _put_tests(copy, MODULES[name])
    file = copy / "outrider" / MODULES[name].source
    text = file.read_text(encoding="utf-8")
    for fault in yaml.safe_load((HERE / "planted.yaml").read_text(encoding="utf-8")).get(name, []):
        if fault["was"] not in text:
            print(f"GONE  {name}: {fault['was']}: review that fault", flush=True)
            continue
        file.write_text(text.replace(fault["was"], fault["becomes"], 1), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", *_PLAIN, *MODULES[name].tests]
        done = subprocess.run(command, cwd=copy, env=os.environ | _quiet(copy), capture_output=True, check=False)
        said = "caught" if done.returncode == 1 else "UNNOTICED"
        print(f"{said}  {name}: {fault['was']}  →  {fault['becomes']}", flush=True)


def _quiet(packages: Path) -> dict[str, str]:
    """Return the environment that the tests need, with `packages` before the installed ones."""
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@dataclass(frozen=True)
class Mutant:
    """One mutant that was tried: its name, whether a test noticed it, and the lines that it exchanged."""

    name: str
    caught: bool
    was: str = ""
    becomes: str = ""


def results(name: str) -> Iterator[Mutant]:
    """Yield every mutant of a module that was tried; the lines only of those that survived."""
    source = MODULES[name].source
    meta = WORK / name / "mutants" / "outrider" / f"{source}.meta"
    for mutant, code in json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"].items():
        if code in (0, 5, 33):  # survived, or no test reaches it
            yield Mutant(mutant, False, *_lines(WORK / name, Path("outrider", source), mutant))
        elif code is not None:
            yield Mutant(mutant, True)


def _lines(copy: Path, source: Path, mutant: str) -> tuple[str, str]:
    """Return the statement that a mutant changed, and its form after that, as `plain` writes them."""
    import libcst
    from mutmut import configuration
    from mutmut.mutation.diff_apply import read_functions_from_index

    with contextlib.chdir(copy):
        configuration.reset_config()
        functions = read_functions_from_index(mutant, source)
    if functions is None:
        raise SystemExit(f"{mutant} is not where mutmut noted it; run that module anew.")
    was, becomes = (ast.unparse(ast.parse(libcst.Module([f]).code)).splitlines() for f in functions)
    changed = [line for line in difflib.unified_diff(was, becomes, n=0) if line[:3] not in ("---", "+++", "@@ ")]
    taken, put = ([line[1:].strip() for line in changed if line[0] == sign] for sign in "-+")
    return " ".join(taken), " ".join(put)


def plain(statement: str) -> str:
    """Return a statement on one line and without comments, so that a list of them does not depend on layout."""
    for body in ("", "\n    pass"):
        with contextlib.suppress(SyntaxError):
            return ast.unparse(ast.parse(statement + body)).splitlines()[0]
    return statement


def same_but_for_wording(was: str, becomes: str) -> bool:
    """Return whether mutmut changed nothing but a string literal that holds a space, which is a text for people."""
    quotes = [place for place, letter in enumerate(was) if letter in "\"'"]
    literals = [(i + 1, j) for i, j in combinations(quotes, 2) if was[i] == was[j] and " " in was[i + 1 : j]]
    return any(becomes == was[:i] + text + was[j:] for i, j in literals for text in _rewordings(was[i:j]))


def _rewordings(text: str) -> tuple[str, str, str]:
    return f"XX{text}XX", text.lower(), text.upper()


def equivalents() -> dict[tuple[str, str], str]:
    """Return the reason for each reviewed exchange of statements that changes no behaviour."""
    rows = yaml.safe_load((HERE / "equivalent.yaml").read_text(encoding="utf-8")) or []
    return {(plain(row["was"]), plain(becomes)): row["because"] for row in rows for becomes in row["becomes"]}


def survivors(name: str) -> list[Mutant]:
    """Return the mutants that change behaviour and that no test noticed."""
    known = equivalents()
    found = [m for m in results(name) if not m.caught]
    return [m for m in found if (m.was, m.becomes) not in known and not same_but_for_wording(m.was, m.becomes)]


def as_equivalents(mutants: list[Mutant]) -> str:
    """Return the mutants in the form of `equivalent.yaml`, one entry for each changed line, without reasons."""
    becomes: dict[str, list[str]] = {}
    for mutant in mutants:
        becomes.setdefault(mutant.was, []).append(mutant.becomes)
    rows = [{"was": was, "becomes": lines, "because": "?"} for was, lines in becomes.items()]
    return yaml.safe_dump(rows, sort_keys=False, allow_unicode=True, width=1000)


def table(names: list[str]) -> str:
    """Return one row per module: tried, caught, equivalent, survived, the score and the time.

    The score is that of the mutants that change behaviour.
    """
    rows = ["| module | mutants | caught | equivalent | survived | score | seconds |", f"|---|{'---:|' * 6}"]
    for name in names:
        tried, left = list(results(name)), survivors(name)
        caught = sum(m.caught for m in tried)
        same = len(tried) - caught - len(left)
        taken = WORK / name / "seconds"
        seconds = sum(map(int, taken.read_text(encoding="utf-8").split())) if taken.exists() else "?"
        score = f"{caught / max(caught + len(left), 1):.1%}"
        cells = (MODULES[name].source, len(tried), caught, same, len(left), score, seconds)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["run", "again", "plant", "show", "table"])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"among {', '.join(MODULES)}")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument("--sample", type=int, help="so many mutants of each module, at random, always the same ones")
    parser.add_argument("--tests-of", metavar="COMMIT", help="the tests of this commit, to tell what later ones add")
    options = parser.parse_args()
    everything = options.job in ("run", "plant")
    names = options.modules or [name for name in MODULES if everything or (WORK / name / "mutants").exists()]
    if unknown := set(names) - set(MODULES):
        parser.error(f"no module {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}.")
    for name in names:
        if options.job == "run":
            run(name, options.resume, options.sample, options.tests_of)
        elif options.job in ("again", "plant"):
            {"again": again, "plant": plant}[options.job](name)
    if options.job == "plant":
        return
    if options.job == "show":
        print(as_equivalents([m for name in names for m in survivors(name)]))
    else:
        print(table(names))


if __name__ == "__main__":
    main()
