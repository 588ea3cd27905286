"""No verb writes over what is finished: a pair, a registry, an export, a drafter, a model, a report, a run, a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from outrider.common.places import MARKER, PAIR, kind_of, require_new, require_place
from outrider.common.untrusted_files import read_json
from outrider.heads import Ngram

from .conftest import Command, failed, succeeded, tiny_recipe

PLACES = ("pair", "registry", "export", "drafter", "model", "report", "run", "comparison", "somebody's")
# A verb's words; P is the place that it is told to write to, F a file that lies there, R a recipe, T its target.
VERBS = {
    "distill": ["distill", "R", "output=P"],
    "train": ["train", "R", "output=P"],
    "train --fresh": ["train", "R", "output=P", "--fresh"],
    "vocab": ["lab", "vocab", "R", "output=P"],
    "eval": ["eval", "R", "--out", "P"],
    "compare": ["compare", "R", "--budget", "1", "--out", "P"],
    "search": ["lab", "search", "R", "--budget", "1", "--out", "P"],
    "refresh": ["refresh", "PAIR", "--target", "T", "--out", "P"],
    "quickstart": ["quickstart", "--out", "P"],
    "report --to": ["lab", "report", "REPORT", "--to", "card", "--out", "P"],
    "report": ["lab", "report", "REPORT", "REPORT", "--out", "P"],
    "gate --markdown": ["gate", "REPORT", "--against", "REPORT", "--markdown", "F"],
    "gate --junit": ["gate", "REPORT", "--against", "REPORT", "--junit", "F"],
    "pair new": ["pair", "new", "P", "R"],
    "pair push": ["pair", "push", "PAIR", "--registry", "P"],
    "pair pull": ["pair", "pull", "tiny", "P", "--registry", "REGISTRY"],
    "export": ["export", "PAIR", "--to", "vllm", "--out", "P"],
    "import": ["import", "EXPORT", "--target", "T", "--out", "P"],
    "import --pair": ["import", "EXPORT", "--target", "T", "--out", "P", "--pair"],
    "grow": ["lab", "grow", "embedded", "--like", "0.4b", "--out", "P"],
    "init": ["init", "T", "--out", "F"],
}
# A verb's own places, where it goes on or adds something; and those that are open for files of other names.
OWN = {("distill", "run"), ("train", "run"), ("train --fresh", "run"), ("vocab", "run")}
OWN |= {
    ("distill", "comparison"),
    ("vocab", "comparison"),
    ("compare", "comparison"),
    ("search", "comparison"),
    ("pair push", "registry"),
}
OWN |= {("pair new", "pair"), ("pair pull", "pair")}
OWN |= {(verb, place) for verb in ("report --to", "report") for place in ("report", "run", "comparison", "somebody's")}
# A registry has no file of its own at its top.
OWN |= {("gate --markdown", "registry"), ("gate --junit", "registry"), ("init", "registry")}
CASES = [(verb, place) for verb in VERBS for place in PLACES if (verb, place) not in OWN]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """One finished place of each kind, made by the verbs, under the kind's name."""
    from typer.testing import CliRunner

    from outrider.scripts.cli import app

    here = tmp_path_factory.mktemp("world")

    def outrider(*words: object) -> None:
        succeeded(CliRunner().invoke(app, [str(word) for word in words]))

    recipe = tiny_recipe(here, target_folder)
    recipe["drafter"] |= {"taps": [1, 3, 5], "steps": 1}
    recipe["eval"] |= {"limit": 2, "baselines": []}
    (here / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (here / "other.yaml").write_text(yaml.safe_dump(recipe | {"output": str(here / "other")}))
    for verb in (("train",), ("eval",), ("pair", "new", here / "pair")):
        outrider(*verb, here / "tiny.yaml")
    outrider("pair", "push", here / "pair", "--registry", here / "registry")
    outrider("export", here / "pair", "--to", "vllm", "--out", here / "export")
    outrider("import", here / "export", "--target", target_folder, "--out", here / "drafter")
    outrider("compare", here / "tiny.yaml", "--budget", "0.5", "--out", here / "comparison")
    outrider("lab", "report", here / "run" / "report", "--to", "card", "--out", here / "forms")
    shutil.copytree(here / "run" / "report", here / "report")
    shutil.copytree(target_folder, here / "model")
    (here / "somebody's" / "data").mkdir(parents=True)
    for name in ("recipe.yaml", "report.md", "blobs", "chapter.txt"):
        (here / "somebody's" / name).write_text("years of work\n")
    return here


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by path."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def words_of(verb: str, place: Path, world: Path, target: Path) -> list[str]:
    files = (file for file in sorted(place.iterdir()) if file.is_file() and file.stat().st_size)
    file = next(files, place / "file")
    meant = {"P": place, "output=P": f"output={place}", "F": file, "R": world / "tiny.yaml", "T": target}
    meant |= {"PAIR": world / "pair", "REGISTRY": world / "registry", "EXPORT": world / "export"}
    meant |= {"REPORT": world / "report"}
    return [str(meant.get(word, word)) for word in VERBS[verb]]


def of(world: Path, place: str, tmp_path: Path) -> Path:
    """A copy of a finished place."""
    return Path(shutil.copytree(world / place, tmp_path / place.replace("'", "")))


@pytest.mark.parametrize(("verb", "place"), CASES)
def test_a_finished_place_is_written_over_by_no_verb(
    world: Path, target_folder: Path, tmp_path: Path, outrider: Command, verb: str, place: str
) -> None:
    folder = of(world, place, tmp_path)
    before = contents(folder)
    failed(outrider(*words_of(verb, folder, world, target_folder)), "othing was written")
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "no lock, and no leftovers beside it"


@pytest.mark.parametrize("place", ["pair", "registry", "run/data"])
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_written_below_a_place_that_is_whole(
    world: Path, target_folder: Path, tmp_path: Path, outrider: Command, verb: str, place: str
) -> None:
    folder = Path(shutil.copytree(world / place, tmp_path / "place"))
    before = contents(folder)
    inside = {str(folder): str(folder / "new"), f"output={folder}": f"output={folder / 'new'}"}
    words = words_of(verb, folder, world, target_folder)
    words = [inside.get(w, str(folder / "new" / "file") if w.startswith(f"{folder}/") else w) for w in words]
    failed(outrider(*words), "nothing was written", "inside the")
    assert contents(folder) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_known_with_its_marker_and_by_its_files_alone(world: Path, tmp_path: Path, place: str) -> None:
    """Earlier versions wrote no markers."""
    folder = of(world, place, tmp_path)
    assert kind_of(folder) == (place if place != "somebody's" else "")
    if place in ("run", "comparison", "registry"):
        assert read_json(folder / MARKER)["kind"] == place
        (folder / MARKER).unlink()
        assert kind_of(folder) == place


def test_a_place_whose_files_were_removed_is_free(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(world / "run" / MARKER, folder)
    require_new(folder)
    require_place(folder, PAIR)


@pytest.mark.parametrize("verb", ["distill", "train", "lab vocab"])
def test_a_run_is_continued_by_its_own_recipe_alone(world: Path, tmp_path: Path, outrider: Command, verb: str) -> None:
    folder = of(world, "run", tmp_path)
    before = contents(folder)
    change = "drafter.steps=2" if verb == "train" else "data.max_new_tokens=4"
    failed(
        outrider(*verb.split(), world / "tiny.yaml", f"output={folder}", change),
        change.partition(".")[2].partition("=")[0],
    )
    assert contents(folder) == before


def test_a_report_is_replaced_when_that_is_asked_for(world: Path, tmp_path: Path, outrider: Command) -> None:
    report, own = of(world, "report", tmp_path), of(world, "forms", tmp_path)
    before = contents(report)
    failed(outrider("eval", world / "tiny.yaml", "--out", report), "is there already")
    failed(outrider("lab", "report", report, "--to", "card", "--out", own), "README.md is there already")
    assert contents(report) == before
    succeeded(outrider("lab", "report", report, "--to", "card", "--out", own, "--replace"))
    succeeded(outrider("eval", world / "tiny.yaml", "--out", report, "--replace"))
    assert contents(report)["report.json"] != before["report.json"]


def test_a_report_about_another_drafter_is_not_replaced_in_the_usual_place(
    world: Path, outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two pairs may have one name and version."""
    folder, other = of(world, "pair", tmp_path), tmp_path / "other"
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "ngram"
    Ngram().save(saved)
    succeeded(outrider("pair", "new", other, world / "tiny.yaml", "--drafter", saved))
    succeeded(outrider("eval", folder))
    before = contents(tmp_path / "runs" / "reports" / "tiny-v1")
    failed(outrider("eval", other), "about another drafter", "--replace")
    assert contents(tmp_path / "runs" / "reports" / "tiny-v1") == before
    succeeded(outrider("eval", folder))


def test_a_gate_writes_over_its_own_files(world: Path, tmp_path: Path, outrider: Command) -> None:
    """A pull request is gated at every push."""
    words = ["gate", world / "report", "--against", world / "report"]
    words += ["--markdown", tmp_path / "gate.md", "--junit", tmp_path / "gate.xml"]
    for _ in range(2):
        succeeded(outrider(*words))
    (tmp_path / "gate.md").write_text("# notes\n")
    failed(outrider(*words), "gate.md is there already")
