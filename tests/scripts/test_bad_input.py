"""Bad input ends with one clear line and the right exit code, before any work: never with a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from outrider.common import IncompatibleError
from outrider.scripts import cli

from ..forked import Forked
from .conftest import Command, wait_for


def refused(result: Result, code: int, *words: str) -> None:
    """The last thing on stderr is one `error: …` that says these things, and this is the exit code."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    said = result.stderr.splitlines()[-1]
    assert said.startswith("error: ")
    assert [w for w in words if w not in said] == [], said


@pytest.mark.parametrize(
    ("verb", "change", "words"),
    [
        ("train", "data.max_tokens=5", ["unknown key data.max_tokens", "did you mean data.max_"]),
        ("train", "training.learning_rat=1.0e-3", ["learning_rate"]),
        ("distill", "data.limit=many", ["data.limit", "expected an integer", "'many'"]),
        ("distill", "target.path=./nowhere", ["./nowhere", "does not exist"]),
        ("distill", "data.prompts=[./nothing.jsonl]", ["nothing.jsonl"]),
        ("distill", "data.prompts=[{here}/empty.jsonl]", ["empty.jsonl"]),
        ("distill", "data.prompts=[{here}/itself.jsonl]", ["itself.jsonl", "does not exist"]),
        ("distill", "target.path={here}/empty.jsonl", ["no model at", "it is a file"]),
        ("train", "eval.baselines=[ngrams]", ["unknown drafter type 'ngrams'", "did you mean 'ngram'"]),
        ("train", 'output="a\\0b"', ["cannot be written into", "null byte", "Choose another folder"]),
    ],
)
def test_a_wrong_key_value_or_file_is_named_with_what_was_expected(
    outrider: Command, recipe_file: Path, tmp_path: Path, verb: str, change: str, words: list[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "itself.jsonl").symlink_to("itself.jsonl")
    refused(outrider(verb, recipe_file, change.replace("{here}", str(tmp_path))), 2, *words)


def test_a_missing_recipe_names_the_packaged_ones(outrider: Command) -> None:
    refused(outrider("distill", "embeded-eagle3"), 2, "embedded-eagle3")


def test_a_damaged_target_is_refused_and_a_pickle_with_what_to_do(
    outrider: Command, recipe_file: Path, target_folder: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(target_folder, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(outrider("distill", recipe_file, f"target.path={damaged}"), 2, "damaged", "safetensors")
    weights.unlink()
    torch.save({"weight": torch.zeros(2)}, damaged / "pytorch_model.bin")
    advice = ["pytorch_model.bin is a pickle", "safetensors.torch.save_file"]
    refused(outrider("distill", recipe_file, f"target.path={damaged}"), 2, *advice)


def test_a_draft_model_with_another_tokenizer_is_incompatible(
    outrider: Command, recipe_file: Path, target_folder: Path, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Exit code 3, and the first token that differs is named."""
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    state = json.loads((other / "tokenizer.json").read_text())
    first, second = (tiny_tokenizer.convert_ids_to_tokens(i) for i in (70, 71))
    vocab = state["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(state))
    result = outrider("train", recipe_file, f"drafter={{type: draft_model, path: {other}}}")
    refused(result, 3, "70")


def test_a_verb_without_its_input_says_what_to_run_first(outrider: Command, recipe_file: Path, tmp_path: Path) -> None:
    refused(outrider("eval", recipe_file), 2, "there is no trained drafter", "outrider train")
    refused(outrider("eval", recipe_file, "--nodes", "4"), 2, "it needs width > 1")
    refused(outrider("generate", tmp_path, "text"), 2, "pair.json is missing")
    refused(outrider("gate", tmp_path, "--against", tmp_path), 2, "no report")


def test_a_prompt_that_is_no_text_is_refused(
    outrider: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell passes on any bytes, as an argument and on stdin."""
    monkeypatch.setattr("outrider.pair.Pair.load", lambda folder: None)
    refused(outrider("generate", tmp_path, "a\udc80"), 2, "no text in UTF-8")
    refused(CliRunner().invoke(cli.app, ["generate", str(tmp_path), "-"], input=b"a\xff"), 2, "no text in UTF-8")


def test_usage_errors_end_with_2(outrider: Command) -> None:
    lines = ("distil", "distill", "eval x --limit 0", "served x --limit 0", "gate x", "pair show x --jso")
    for line in lines:
        result = outrider(*line.split())
        assert result.exit_code == 2, (line, result.output)


@pytest.mark.parametrize("verb", ["distill", "train", "compare", "eval", "pair new"])
def test_an_impossible_output_is_refused_before_any_work(
    outrider: Command, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A file is in the way: no target is loaded first."""
    monkeypatch.setattr("outrider.targets.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    arguments = {"compare": [recipe_file, "--out", out], "eval": [recipe_file, "--out", out]}
    arguments["pair new"] = [out, recipe_file]
    result = outrider(*verb.split(), *arguments.get(verb, [recipe_file, f"output={out}"]))
    refused(result, 2, "cannot be written into", str(out), f"{tmp_path / 'file'} is a file", "Choose another folder.")
    assert not list(tmp_path.glob("file/*"))


@pytest.mark.parametrize("verb", ["eval", "tune", "generate"])
@pytest.mark.parametrize("value", ["1e-38", "inf", "nan"])
def test_a_temperature_that_no_logits_can_be_divided_by_is_refused(outrider: Command, verb: str, value: str) -> None:
    """Before anything is read: the pair does not exist."""
    result = outrider(verb, "nowhere", *(["text"] if verb == "generate" else []), "--temperature", value)
    assert result.exit_code == 2
    assert "from 0.0001 to 10000" in " ".join(result.stderr.replace("│", "").split())


Raising = Callable[[BaseException], Result]


@pytest.fixture
def raising(outrider: Command, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> Raising:
    """`raising(error)`: the result of a verb in which that is raised."""

    def run(error: BaseException) -> Result:
        monkeypatch.setattr("outrider.distill.distill", Mock(side_effect=error))
        return outrider("distill", recipe_file)

    return run


FULL = [
    OSError(errno.ENOSPC, "No space left on device", "/somewhere/run/data/00001.jsonl"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    SafetensorError(f"Error while serializing: I/O error: Disk quota exceeded (os error {errno.EDQUOT})"),
]


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_names_the_folder(raising: Raising, error: Exception) -> None:
    """Reported by the system, or only in the words of a library, which do not say where: no other folder is named."""
    place = "the disk that holds /somewhere/run/data is full" if isinstance(error, OSError) else "a disk is full"
    result = raising(error)
    said = "Disk quota exceeded" if "quota" in str(error) else "No space left on device"
    refused(result, 2, place, said, "Free some space")
    assert str(Path.cwd()) not in result.stderr


BROKEN: list[Exception] = [OSError(n, os.strerror(n)) for n in (errno.EINTR, errno.EAGAIN, errno.ENOLCK, errno.ENODEV)]
BROKEN += [PermissionError("Permission denied (os error 13)")]  # safetensors, which could not map a file
BROKEN += [SafetensorError("Error while deserializing header: I/O error: Input/output error (os error 5)")]
BROKEN += [BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))]  # of a server, or of a process of ours
BROKEN += [RuntimeError("Symlink loop from '/a'")]  # of pathlib
BROKEN += [ImportError("libtorch_cpu.so: failed to map segment from shared object")]  # under `ulimit -v`


@pytest.mark.parametrize("error", BROKEN)
def test_what_a_system_refuses_is_no_fault_of_ours(raising: Raising, error: Exception) -> None:
    """It names no file where it fails to close one, or to lock it; only calls that were wrong are our fault."""
    refused(raising(error), 2, str(error).partition("] ")[2])
    ours = FileNotFoundError(errno.ENOENT, "No such file or directory", cli.__file__)
    for fault in (OSError(errno.EBADF, "Bad file descriptor"), ours):
        assert raising(fault).exit_code == 70


def test_a_command_whose_folder_is_gone_says_so(
    raising: Callable[[Any], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def delete(*_: Any, **__: Any) -> None:
        here.rmdir()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "out")

    refused(raising(delete), 2, "out: No such file or directory")


def test_a_fault_of_ours_is_no_finding(raising: Raising) -> None:
    """An exception that nobody foresaw ends with 70 and its traceback: exit code 1 is for findings."""
    result = raising(KeyError("surprise"))
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert "please report" in result.stderr


class PanicException(BaseException):
    """As libraries in Rust raise it: no Exception."""


def test_a_library_that_panics_is_no_finding_and_no_fault_of_ours(raising: Raising) -> None:
    refused(raising(PanicException("Onig: retry-limit-in-match over")), 2, "a library broke off (Onig: retry-limit")


def test_debugging_shows_tracebacks(raising: Raising, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    result = raising(IncompatibleError("they do not fit"))
    assert result.exit_code == 3
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_its_code_and_the_same_command_goes_on(
    outrider: Command, recipe_file: Path, tmp_path: Path, number: int, code: int
) -> None:
    """A real signal to a process of its own in the middle of distilling; then the rest, here."""
    longer = ["data.max_new_tokens=60", "data.batch_size=1", "data.limit=4"]
    process = Forked(lambda: cli.app(["distill", str(recipe_file), *longer]), tmp_path)
    partial = tmp_path / "run" / "data.partial"
    wait_for(lambda: any(partial.glob("0*.jsonl")), process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "what was done is kept" in said
    assert "Traceback" not in said
    kept = {f.name: f.read_bytes() for f in partial.glob("0*.jsonl")}
    assert 0 < len(kept) < 4
    assert outrider("distill", recipe_file, *longer).exit_code == 0
    assert (tmp_path / "run" / "data" / "provenance.json").is_file()
