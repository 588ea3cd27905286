"""What is installed is what stands in the checkout: every package listed, every data file shipped, nothing else."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_OURS = {"extras", ".venv", "build", "dist", "tests", ".git", "runs", "quickstart", "node_modules"}
# Files beside the code that are for the checkout only.
CHECKOUT_ONLY = {"scripts/quickstart", "scripts/test", "scripts/environment.sh"}
MANUAL = set(SETUPTOOLS["data-files"]["share/man/man1"])


def package_folders() -> list[Path]:
    folders = (p.parent for p in ROOT.rglob("__init__.py"))
    return sorted(f for f in folders if f != ROOT and not NOT_OURS & set(f.relative_to(ROOT).parts))


def tracked_files() -> list[str]:
    """Files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    found = {"outrider." + ".".join(f.relative_to(ROOT).parts) for f in package_folders()}
    assert set(SETUPTOOLS["packages"]) == found


def test_packages_beside_this_one_bring_what_their_entry_points_name() -> None:
    (pair,) = (ROOT / "extras").glob("*/pyproject.toml")
    values = tomllib.loads(pair.read_text(encoding="utf-8"))
    (entry,) = values["project"]["entry-points"]["outrider.pairs"].values()
    module, _, name = entry.partition(":")
    assert f"{name} = " in (pair.parent / module / "__init__.py").read_text(encoding="utf-8")
    assert (pair.parent / module / "pair" / "pair.json").is_file()


def test_the_root_is_no_package() -> None:
    """A root __init__.py would import everything twice, and a folder called outrider would shadow the installed one."""
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "outrider").exists()


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_room_says_that_it_is_typed() -> None:
    rooms = [f for f in package_folders() if f.parent == ROOT]
    assert [f.name for f in rooms if not (f / "py.typed").exists()] == []


def test_every_data_file_is_shipped() -> None:
    """Files that are no Python match a package-data pattern of their package, or are for the checkout only."""
    missing = []
    for name in tracked_files():
        package = package_of(name)
        if package is None or name.endswith(".py") or name in CHECKOUT_ONLY | MANUAL:
            continue
        patterns = [*SETUPTOOLS["package-data"].get(package, []), *SETUPTOOLS["package-data"]["*"]]
        inside = name.removeprefix(package.removeprefix("outrider.").replace(".", "/") + "/")
        if not any(fnmatch.fnmatch(inside, p) or fnmatch.fnmatch(inside, p.removeprefix("**/")) for p in patterns):
            missing.append(name)
    assert missing == []


def package_of(name: str) -> str | None:
    """Return the innermost listed package that a file of the checkout lies in."""
    packages = (".".join(["outrider", *folder.parts]) for folder in Path(name).parents)
    return next((package for package in packages if package in SETUPTOOLS["packages"]), None)


def test_benchmarks_run_from_a_checkout_and_nothing_that_is_installed_needs_them() -> None:
    assert not (ROOT / "benchmarks" / "__init__.py").exists()
    importlib.import_module("benchmarks.page")
    files = [ROOT / name for name in tracked_files() if name.endswith(".py")]
    shipped = [f for f in files if not {"benchmarks", "tests", "docs"} & set(f.relative_to(ROOT).parts)]
    needing = re.compile(r"^\s*(from|import) [\w.]*\bbenchmarks\b", flags=re.MULTILINE)
    assert [f.name for f in shipped if needing.search(f.read_text(encoding="utf-8"))] == []


def test_licence_files_exist() -> None:
    assert [name for name in PROJECT["project"]["license-files"] if not (ROOT / name).is_file()] == []


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    """Both scripts install from these pins; a local build tag would not be found by everybody."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 and "+" not in pin for pin in pins)
    pinned = {normalised(pin.partition("==")[0]) for pin in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    chosen = ("dev", "wandb", "deepspeed", "tensorboard", "trackio", "liger", "mutation", "docs")
    wanted = [*PROJECT["project"]["dependencies"], *(each for extra in chosen for each in extras[extra])]
    assert [w for w in wanted if normalised(re.split("[>=[]", w)[0].strip()) not in pinned] == []


def test_the_supported_versions_are_those_of_the_package() -> None:
    rows = [line.split(" | ") for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    said = {row[0].strip("| "): (row[1].strip(), row[2].strip("| ")) for row in rows}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    bounds = {re.split("[>=]", each)[0]: each for each in PROJECT["project"]["dependencies"]}
    for name in ("torch", "transformers", "accelerate", "peft"):
        assert said[name] == (bounds[name].removeprefix(name), pins[name])
    listed = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert said["Python"][0] == ", ".join(listed)
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert f'python: ["{said["Python"][1].replace(" and ", chr(34) + ", " + chr(34))}"]' in workflow


def normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_importing_the_command_loads_neither_torch_nor_transformers() -> None:
    """`outrider --help` answers in less than a second because of this."""
    heavy = "{'torch', 'transformers', 'datasets', 'matplotlib'}"
    rooms = "outrider.scripts.cli, outrider.recipes, outrider.eval"
    code = f"import sys, {rooms}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel that is built from it, each twice in folders of other names: they are the same bytes."""
    runs = [build(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    assert digests(runs[0]) == digests(runs[1])
    [sdist], [wheel] = runs[0].glob("*.tar.gz"), runs[0].glob("*.whl")
    return sdist, wheel


def build(place: Path) -> Path:
    """Return the folder of what is built from a copy of the checkout, since a build leaves folders where it runs."""
    for name in tracked_files():
        (place / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "copy" / name).write_bytes((ROOT / name).read_bytes())
    code = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    fixed = os.environ | {"SOURCE_DATE_EPOCH": "1764356400"}
    subprocess.run([sys.executable, "-c", code, place], cwd=place / "copy", env=fixed, check=True, timeout=300)
    [sdist] = place.glob("*.tar.gz")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(place), str(sdist)]
    subprocess.run(wheel, env=fixed, check=True, timeout=300)
    return place


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("outrider-*")}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[1]).namelist()
    stray = [n for n in names if not n.startswith("outrider/") and ".dist-info/" not in n]
    assert stray == [f"outrider-{PROJECT['project']['version']}.data/data/share/man/man1/outrider.1"]
    left_out = ("outrider/tests", "outrider/.ci", "outrider/docs", "outrider/benchmarks")
    assert not [n for n in names if n.startswith(left_out) or n.endswith((".sh", ".pyc"))]
    assert {"outrider/recipes/embedded-eagle3.yaml", "outrider/eval/reports/report.html.jinja"} <= set(names)
    assert {f"outrider/{room.name}/py.typed" for room in package_folders() if room.parent == ROOT} <= set(names)
    if (ROOT / "recipes/embedded/target").exists():
        assert "outrider/recipes/embedded/target/model.safetensors" in names
        assert "outrider/recipes/embedded/suites/code.jsonl" in names


@pytest.mark.slow
def test_an_index_would_take_the_built_files(built: tuple[Path, Path]) -> None:
    """At most 20 MB; the description has absolute links alone; the sdist holds what a build needs, and no tests."""
    assert [file.name for file in built if file.stat().st_size > 20_000_000] == []
    wheel = zipfile.ZipFile(built[1])
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("https://", "#"))] == []
    with tarfile.open(built[0]) as sdist:
        tops = {member.name.split("/")[1] for member in sdist.getmembers() if "/" in member.name}
    assert {"setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "recipes"} <= tops
    assert not {"tests", "docs", "benchmarks"} & tops


@pytest.mark.slow
def test_an_uninstall_leaves_nothing(built: tuple[Path, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    before = set(site.iterdir())
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "-q"]
    subprocess.run([*pip, "install", "--no-deps", built[1]], check=True, timeout=300)
    assert (site / "outrider" / "scripts" / "cli.py").is_file()
    subprocess.run([*pip, "uninstall", "-y", "outrider"], check=True, timeout=300)
    assert set(site.iterdir()) == before


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, with the libraries of this one but not its editable installation."""
    venv.create(tmp_path / "venv")
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(built[1]).extractall(site)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "work").mkdir()

    def run(*code: str) -> str:
        command = [tmp_path / "venv/bin/python", "-c", *code]
        return subprocess.check_output(command, cwd=tmp_path / "work", text=True, timeout=300)

    assert run("import outrider.common; print(outrider.common.__file__)").startswith(str(site))
    small = ["data.limit=8", "data.max_new_tokens=16", "training.max_steps=2"]
    for words in (["--help"], ["doctor"], ["init", "embedded", "--out", "my.yaml"], ["train", "my.yaml", *small]):
        run("from outrider.scripts import main; main()", *words)
    assert list((tmp_path / "work/runs").rglob("drafter/model.safetensors"))
