"""Every `--json` answer is one object on stdout, as its schema says; so are pair.json and report.json."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from jsonschema import Draft202012Validator

from outrider.common.digests import CHECKSUM
from outrider.scripts import man_page
from outrider.scripts.help_examples import EXAMPLES as OWN_EXAMPLES
from outrider.scripts.json_schemas import ANSWERS, all_answers, write_schemas
from outrider.scripts.verb_group import verb_groups

from .conftest import Command, all_schemas, all_verbs, answer, succeeded, validator, verb_of

EXAMPLES = dict(OWN_EXAMPLES)
OWN = set(all_answers())
for _group in verb_groups().values():
    EXAMPLES |= {verb: list(lines) for verb, lines in _group.examples.items()}
    OWN -= _group.bodies().keys()


def test_every_schema_can_be_written_to_a_folder(tmp_path: Path) -> None:
    write_schemas(tmp_path / "new")
    found = all_schemas()
    assert {file.name for file in (tmp_path / "new").iterdir()} == set(found) >= {f"{kind}.json" for kind in ANSWERS}
    for name, value in found.items():
        assert json.loads((tmp_path / "new" / name).read_text(encoding="utf-8")) == value, name
        Draft202012Validator.check_schema(value)


def test_a_schema_refuses_what_is_no_answer() -> None:
    good = {"schema": "outrider.pair-verify/1", "exit_code": 0, "folder": "p", "intact": True, "differences": []}
    good["signer"] = None
    schema = validator("pair-verify")
    assert schema.is_valid(good)
    for bad in ({"exit_code": "0"}, {"schema": "outrider.gate/1"}, {"differences": None}, {"more": 1}):
        assert not schema.is_valid(good | bad), bad
    assert not schema.is_valid({k: v for k, v in good.items() if k != "intact"})


def test_every_verb_answers_as_its_schema_says(
    outrider: Command, recipe_file: Path, tmp_path: Path, changed_target: Path
) -> None:
    """The life of a pair, each verb with --json; what it says is what it left on disk."""
    run, pair = tmp_path / "run", tmp_path / "pair"
    assert answer("distill", outrider("distill", recipe_file, "--json"))["counts"]["sequences"] == 6
    trained = answer("train", outrider("train", recipe_file, "--json"))
    assert (trained["steps"], trained["drafter"]) == (2, str(run / "drafter"))
    report = answer("eval", outrider("eval", recipe_file, "--json"))
    assert report["folder"] == str(run / "report")
    saved = json.loads((run / "report" / "report.json").read_text())
    validator("report").validate(saved)
    assert report["figures"] == saved["figures"]

    made = answer("pair-new", outrider("pair", "new", pair, recipe_file, "--json"))
    manifest = json.loads(outrider("pair", "show", pair, "--json").stdout)
    validator("pair").validate(manifest)
    assert (made["digest"], made["version"]) == (manifest["digest"], 1)
    assert [h["tau"] for h in made["headline"]] == [h["tau"] for h in manifest["measurements"]["headline"]]
    assert answer("pair-verify", outrider("pair", "verify", pair, "--json"))["intact"]

    arguments = ["--limit", 2, "--batch", 1, "--batch", 2, "--max-new-tokens", 4]
    tuned = answer("tune", outrider("tune", pair, *arguments, "--json"))
    assert tuned["stored"]
    probed = outrider("probe", pair, "--target", changed_target, "--json")
    found = answer("probe", probed, probed.exit_code)
    assert (found["verdict"], found["pair"]) == ({0: "fresh", 1: "stale"}[probed.exit_code], made["digest"])
    arguments = ["--target", changed_target, "--out", tmp_path / "next", "training.max_steps=1", "--json"]
    assert answer("refresh", outrider("refresh", pair, *arguments))["lineage"]["parent"]["digest"] == made["digest"]

    gated = outrider("gate", tmp_path / "next" / "pair", "--against", pair, "--json")
    verdict = answer("gate", gated, gated.exit_code)
    assert verdict["passed"] == (gated.exit_code == 0)
    assert not verdict["same_target"]
    assert "different targets" in verdict["remarks"][0]
    assert answer("gate", outrider("gate", pair, "--against", pair, "--json"))["same_target"]

    (pair / "recipe.yaml").write_text("altered")
    differences = answer("pair-verify", outrider("pair", "verify", pair, "--json"), 1)["differences"]
    assert [line.partition(":")[0] for line in differences] == ["recipe.yaml"]


def test_the_answers_about_one_recipe(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    answer("doctor", outrider("doctor", "--json"))
    assert answer("plan", outrider("plan", recipe_file, "--json"))["peak_memory"] > 0
    assert answer("data-check", outrider("data", "check", recipe_file, "--json"), 1)["sources"][0]["leaked"] == 3
    arguments = ["compare", recipe_file, "--budget", "0.2", "--out", tmp_path / "compared", "eval.limit=1", "--json"]
    result = outrider(*arguments)
    if result.exit_code == 0:
        answer("compare", result)
    else:
        answer("error", result, result.exit_code)


def test_what_went_wrong_is_an_answer_too(outrider: Command, tmp_path: Path) -> None:
    for words in (("gate", tmp_path, "--against", tmp_path), ("pair", "verify", tmp_path), ("eval", "no-such-recipe")):
        result = outrider(*words, "--json")
        said = answer("error", result, 2)["error"]
        assert said in result.stderr.replace("\n", " ") or said in result.stderr


def test_every_answer_is_shown_by_a_test() -> None:
    serving = Path(__file__).parents[1] / "serving"
    beside = [
        Path(__file__).with_name(f"test_{name}.py") for name in ("pair_registry", "export_cli", "fetching", "dry_runs")
    ]
    files = [Path(__file__), *beside, *sorted(serving.glob("test_*.py"))]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [kind for kind in OWN if f'answer("{kind}"' not in source] == []


def test_the_gate_writes_junit_and_markdown(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    """A failure is a failure there, too; what the files say is what the answer says."""
    for verb in ("train", "eval"):
        succeeded(outrider(verb, recipe_file))
    good, bad = tmp_path / "run" / "report", tmp_path / "bad"
    bad.mkdir()
    report = json.loads((good / "report.json").read_text())
    for record in report["records"]:
        if record["contestant"] == "eagle3":
            record["tokens"] *= 5
    del report[CHECKSUM]
    (bad / "report.json").write_text(json.dumps(report))
    junit, markdown = tmp_path / "new" / "gate.xml", tmp_path / "gate.md"
    for against, failures in ((good, 0), (bad, 1)):
        result = outrider("gate", good, "--against", against, "--junit", junit, "--markdown", markdown, "--json")
        verdict = answer("gate", result, failures)
        suites = ElementTree.fromstring(junit.read_text(encoding="utf-8"))
        assert (suites.get("tests"), suites.get("failures")) == ("1", str(failures))
        assert len(suites.findall("./testsuite/testcase/failure")) == failures
        (line,) = (found["line"] for found in verdict["findings"])
        assert line in junit.read_text(encoding="utf-8").replace("&gt;", ">")
        text = markdown.read_text(encoding="utf-8")
        assert text.startswith("### ❌ gate failed" if failures else "### ✅ gate passed")
        assert f"{verdict['findings'][0]['tau_after']:.2f}" in text


def test_every_verb_has_examples_that_the_command_line_takes() -> None:
    assert set(EXAMPLES) == all_verbs()
    for verb, lines in EXAMPLES.items():
        for line in lines:
            command, path, rest = verb_of(shlex.split(line))
            assert (line.split()[0], path) == ("outrider", verb.split())
            command.make_context(verb, rest)


def test_the_manual_page_is_the_command_lines_and_has_every_verb_and_option() -> None:
    file = Path(man_page.__file__).with_name("outrider.1")
    text = file.read_text(encoding="utf-8")
    assert text == man_page.page(), "python -m outrider.scripts.man_page writes it anew"
    assert {line.removeprefix(".SS outrider ") for line in text.splitlines() if line.startswith(".SS ")} == all_verbs()
    for verb in all_verbs():
        part = text.partition(f"\n.SS outrider {verb}\n")[2].partition("\n.SS ")[0].replace("\\-", "-")
        names = {name for one in verb_of(["outrider", *verb.split()])[0].params for name in one.opts}
        assert [name for name in names if name[0] == "-" and name not in part] == [], verb


def test_help_shows_the_examples(outrider: Command) -> None:
    for verb, lines in EXAMPLES.items():
        shown = " ".join(outrider(*verb.split(), "--help").stdout.split())
        assert " ".join(lines[0].split()) in shown, verb


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs(shell: str) -> None:
    """The script that a shell loads, and what it asks for then."""
    command = [sys.executable, "-m", "outrider.scripts.cli"]
    environment = {"_OUTRIDER_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"}
    script = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    assert "_OUTRIDER_COMPLETE=complete_" in script
    asked = {"bash": {"COMP_WORDS": "outrider pro", "COMP_CWORD": "1"}}.get(
        shell, {"_TYPER_COMPLETE_ARGS": "outrider pro", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    found = subprocess.run(
        command, capture_output=True, text=True, env={"_OUTRIDER_COMPLETE": f"complete_{shell}", **asked}
    ).stdout
    assert "probe" in found


def completed(line: str, folder: Path) -> list[str]:
    """Return what bash is told at the end of a line; without torch, in less than a second of processor."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_OUTRIDER_COMPLETE": "complete_bash"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "outrider.scripts.cli"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=asked | {"PYTHONPROFILEIMPORTTIME": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert not re.search(r"\| +(torch|transformers|numpy)$", done.stderr, flags=re.MULTILINE)
    return done.stdout.split()


def test_shells_complete_recipes_and_pairs(tmp_path: Path) -> None:
    for file in ("my.yaml", "more/other.yaml", "runs/pair-v1/pair.json", "runs/v2/pair/pair.json", "runs/note.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert completed("outrider train m", tmp_path) == ["more/other.yaml", "my.yaml"]
    assert completed("outrider data check embedded-ea", tmp_path) == ["embedded-eagle1", "embedded-eagle3"]
    assert completed("outrider tune ", tmp_path) == ["runs/pair-v1"]
    assert completed("outrider pair show runs/", tmp_path) == ["runs/pair-v1", "runs/v2/pair"]
    assert completed("outrider gate runs/pair-v1 --against runs/v", tmp_path) == ["runs/v2/pair"]


def test_every_recipe_and_pair_of_a_verb_is_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the words that stand for them in its help."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-pair").mkdir()
    (tmp_path / "a-pair" / "pair.json").touch()
    seen = 0
    for verb in sorted(all_verbs()):
        command = verb_of(["outrider", *verb.split()])[0]
        for parameter in command.params:
            for word, known in (("RECIPE", "embedded-eagle3"), ("PAIR", "a-pair")):
                if word in (parameter.metavar or ""):
                    found = parameter.shell_complete(typer.Context(command), known[:3])
                    assert known in [one.value for one in found], (verb, parameter.name)
                    seen += 1
    assert seen > 20


def test_what_libraries_print_never_gets_into_an_answer(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, recipe_file: Path
) -> None:
    """Some print while they are imported, others while they work."""
    from outrider.scripts import doctor

    examine = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda: print("chatter of a library") or examine())
    result = outrider("doctor", "--json")
    assert "chatter" in result.stderr
    answer("doctor", result)
    assert "chatter" in outrider("doctor").stdout
