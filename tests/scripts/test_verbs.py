"""Every verb on a tiny target, in the order of a pair's life: each takes what the one before left."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from outrider.decode import Decoder
from outrider.pair import Pair
from outrider.scripts.cli import ORDER, VERBS
from outrider.targets import Target

from ..eval.conftest import make_tuning
from .conftest import Command, all_verbs, failed, succeeded, verb_of


def test_help_takes_less_than_a_second() -> None:
    """Of CPU time: the machine may be busy with something else."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run(
        [sys.executable, "-m", "outrider.scripts.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert "quickstart" in shown


def test_help_has_every_verb_in_one_line_in_the_order_of_work(outrider: Command) -> None:
    """On a terminal of 80 columns; at most 20 verbs and the groups, under titles."""
    shown = succeeded(outrider("--help", env={"COLUMNS": "80"})).stdout
    titles = re.findall(r"─ (\w[\w ]+) ─", shown)
    assert titles == ["Options", *VERBS, "More"]
    lines = re.findall(r"^│ (.{10})  \S.*│$", shown.partition(f"─ {titles[1]} ─")[2], flags=re.MULTILINE)
    assert [line.strip() for line in lines] == ORDER
    assert {verb.split()[0] for verb in all_verbs()} == set(ORDER)
    assert len([verb for verb in all_verbs() if " " not in verb]) <= 20
    helps = {verb: verb_of(["outrider", *verb.split()])[0].help or "" for verb in all_verbs()}
    assert [verb for verb, text in helps.items() if re.search(r"\S\n\S", text)] == [], "typer keeps such breaks"


_LIGHT = """
import json, sys
from typer.testing import CliRunner
from outrider.scripts.cli import app
for code, words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, (words, result.exit_code, result.output, result.stderr)
    assert not {"torch", "transformers", "datasets"} & sys.modules.keys(), words
"""


def run_without_torch(*lines: tuple[int, list[object]]) -> None:
    """In one process of their own: with torch a verb takes six seconds of processor time, without it half of one."""
    told = json.dumps([(code, [str(word) for word in words]) for code, words in lines])
    done = subprocess.run([sys.executable, "-c", _LIGHT, told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_reads_no_model_imports_no_torch(tmp_path: Path, target_folder: Path) -> None:
    """Every verb's help, what is refused at once, and the verbs about recipes and configs."""
    none = str(tmp_path / "nope")
    refused: list[list[object]] = [
        *([verb, none] for verb in ("distill", "train", "eval", "plan", "tune", "compare")),
        *([verb, "embedded-eagle3", f"target.path={none}"] for verb in ("distill", "train", "eval", "plan", "compare")),
        *([*verb, none] for verb in (["data", "check"], ["data", "show"], ["pair", "new", tmp_path / "p"])),
        *([verb, none, "--target", "x"] for verb in ("probe",)),
        ["refresh", none, "--target", "x", "--out", tmp_path / "p"],
        ["generate", none, "text"],
        ["export", none, "--to", "vllm"],
        ["served", none, "--url", "http://127.0.0.1:9"],
        ["lab", "watch", "http://127.0.0.1:9", "--once", "--state", tmp_path / "watch.json"],
        ["recipe", "--explain", "eval.repeat"],
    ]
    done: list[list[object]] = [
        *([*verb.split(), "--help"] for verb in sorted(all_verbs())),
        ["recipe", "--explain", "eval.repeats"],
        ["init", target_folder, "--out", tmp_path / "my.yaml"],
        ["doctor", "--for", "served"],
    ]
    run_without_torch(*((0, words) for words in done), *((2, words) for words in refused))


def test_version_is_the_installed_one(outrider: Command) -> None:
    assert succeeded(outrider("--version")).stdout == f"outrider {version('outrider')}\n"


def test_a_pairs_life(
    outrider: Command, recipe_file: Path, tmp_path: Path, target_folder: Path, changed_target: Path
) -> None:
    """Every verb works on what the one before it left, and a flipped bit is found.

    distill → train → eval → pair new → show → verify → generate → gate → probe → refresh → gate.
    """
    run, pair = tmp_path / "run", tmp_path / "pair"
    assert "responses:" in succeeded(outrider("distill", recipe_file)).stdout
    assert "drafter after 2 steps" in succeeded(outrider("train", recipe_file)).stdout
    assert "eagle3" in succeeded(outrider("eval", recipe_file)).stdout
    assert (run / "report" / "report.html").is_file()

    succeeded(outrider("pair", "new", pair, recipe_file))
    shown, whole = outrider("pair", "show", pair).stdout, json.loads(outrider("pair", "show", pair, "--json").stdout)
    assert "version 1" in shown
    assert f"{whole['digest'][:12]}…" in shown
    assert not re.search("[0-9a-f]{20}", shown), "a digest of 64 digits would wrap"
    assert whole["version"] == 1
    assert "is intact" in succeeded(outrider("pair", "verify", pair)).stdout
    assert "is intact" in succeeded(outrider("pair", "verify", pair, "--target", target_folder)).stdout
    succeeded(outrider("gate", pair, "--against", run / "report"))
    Pair.load(pair).store_tuning(make_tuning({1: 5}))
    place = ["--registry", tmp_path / "registry"]
    run_without_torch(
        *((0, ["pair", *words]) for words in (["show", pair], ["show", pair, "--json"], ["verify", pair, "--json"])),
        *((0, ["pair", *verb, *place]) for verb in (["push", pair], ["log"], ["log", "--json"], ["diff", pair, pair])),
        (0, ["pair", "pull", "tiny", tmp_path / "pulled", *place]),
        (0, ["gate", pair, "--against", pair]),
        (0, ["gate", pair, "--against", pair, "--json", "--junit", tmp_path / "gate.xml"]),
    )
    succeeded(outrider("eval", pair, "--depth", "1", "--limit", "1", "--out", tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "report.json").read_text())["contestants"][0]["depth"] == 1

    probed = outrider("probe", pair, "--target", changed_target)
    assert probed.exit_code in (0, 1)
    assert probed.stdout.split()[-1]
    refreshed = outrider(
        "refresh", pair, "--target", changed_target, "--out", tmp_path / "next", "training.max_steps=1"
    )
    assert "version 2" in succeeded(refreshed).stdout
    assert outrider("gate", tmp_path / "next" / "pair", "--against", pair).exit_code in (0, 1)

    weights = pair / "drafter" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = outrider("pair", "verify", pair)
    assert found.exit_code == 1
    assert "drafter/model.safetensors: content differs" in " ".join(found.stdout.split())


def test_generate_streams_the_plain_targets_text(outrider: Command, ngram_pair: Path, target_folder: Path) -> None:
    """`--plain` gives the text and nothing else; without it prompt, text and a closing line with τ and speedup."""
    target = Target.load(target_folder)
    tokenizer, prompt = target.require_tokenizer(), "def add(first, second):\n    return first"
    tokens = Decoder(target).generate([tokenizer(prompt)["input_ids"]], max_new_tokens=12).tokens[0]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    arguments = ["generate", ngram_pair, prompt, "--max-new-tokens", 12]
    assert succeeded(outrider(*arguments, "--plain")).stdout == expected
    shown = succeeded(outrider(*arguments)).stdout
    assert "τ " in shown
    assert "× (one run" in shown
    assert "×" not in succeeded(outrider(*arguments, "--no-compare")).stdout


def test_a_probe_without_a_baseline_says_so(outrider: Command, ngram_pair: Path, target_folder: Path) -> None:
    failed(outrider("probe", ngram_pair, "--target", target_folder), "without calibration prompts")
