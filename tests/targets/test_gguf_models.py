"""GGUF files as targets: dequantised as `transformers` does it, known by their digests, and refused by sentences."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from outrider.common import BadInputError, IncompatibleError, Refusal
from outrider.common.digests import file_digest
from outrider.common.untrusted_files import read_json
from outrider.decode import Decoder, Plan
from outrider.formats import draft_models
from outrider.formats.draft_models import write_gguf
from outrider.heads import Ngram
from outrider.pair import StaleError
from outrider.pair.export import export_pair
from outrider.pair.new import paired
from outrider.scripts.cli import app
from outrider.targets import Target, config_only_target
from outrider.targets.config_only import target_without_layers
from outrider.targets.gguf_models import RECORD, converted, models_folder, read_gguf

from ..conftest import drafter_in_training, make_llama

Write = Callable[..., Path]
KINDS = ["F32", "Q8_0", "Q4_1"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def write(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(kind, **config)`: the GGUF of one random Llama, whose matrices are quantised so."""

    def written(kind: str = "F32", **config: Any) -> Path:
        special = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
        model = make_llama(vocab=len(tiny_tokenizer), layers=4, **special | config)
        model = model if kind == "F32" else model.half()  # whose norms stay float32
        (tmp_path / kind).mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setitem(draft_models._KINDS, next(model.parameters()).dtype, gguf.GGMLQuantizationType[kind])
            write_gguf(model, tiny_tokenizer, tmp_path / kind / "model.gguf")
        return tmp_path / kind / "model.gguf"

    return written


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_the_dequantised_model(write: Write, kind: str) -> None:
    file = write(kind)
    target = Target.load(file, device="cpu")
    prompt = target.require_tokenizer()("def add(first, second):")["input_ids"]
    expected = read_gguf(file).generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    text = Decoder(target, Ngram()).generate([prompt], max_new_tokens=24, plan=Plan(3)).tokens[0]
    assert [*prompt, *text] == expected
    assert target.source["gguf"] == file_digest(file)
    assert str(target.source["gguf_type"]).startswith(f"{kind} (")


def test_a_folder_with_one_of_them_is_the_same_target_through_every_door(
    write: Write, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    file = write("Q8_0")
    loaded = Target.load(file, device="cpu")
    doors = [Target.load(file.parent, device="cpu"), config_only_target(file), target_without_layers(file)]
    assert [door.fingerprint() for door in doors] == [loaded.fingerprint()] * 3
    assert all(door.source["gguf"] == loaded.source["gguf"] for door in doors)
    assert loaded.require_tokenizer().get_vocab() == tiny_tokenizer.get_vocab()
    assert loaded.require_tokenizer().chat_template == tiny_tokenizer.chat_template
    assert loaded.eos_ids == (tiny_tokenizer.eos_token_id,)
    record = read_json(converted(file) / RECORD)
    assert record["types"] == {"Q8_0": 30, "F32": 9}
    assert record["versions"]["transformers"]


def test_every_token_that_ends_an_answer_does(
    write: Write, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = draft_models.write_tokenizer

    def with_turns(writer: gguf.GGUFWriter, *arguments: Any) -> None:
        plain(writer, *arguments)
        writer.add_eot_token_id(7)

    monkeypatch.setattr(draft_models, "write_tokenizer", with_turns)
    assert Target.load(write(), device="cpu").eos_ids == (tiny_tokenizer.eos_token_id, 7)


def test_two_quantisations_of_a_model_do_not_mix(write: Write, tmp_path: Path) -> None:
    files = [write(kind) for kind in ("Q8_0", "Q4_1")]
    own, other = (Target.load(file, device="cpu") for file in files)
    assert own.fingerprint() != other.fingerprint()
    head = drafter_in_training(own, {"type": "eagle3", "steps": 2, "taps": [0, 1, 2]})
    pair = paired(tmp_path / "pair", own, head)
    source = pair.manifest.target.source
    assert (source.path, source.gguf) == (str(files[0]), file_digest(files[0]))
    assert source.gguf_type == "Q8_0 (30 Q8_0, 9 F32)"
    assert pair.load_target().fingerprint() == own.fingerprint()
    launched = export_pair(pair, "vllm", tmp_path / "vllm", 2, own).launch.command
    assert str(converted(files[0])) in launched, "an engine gets what was measured"
    with pytest.raises(StaleError, match="30 of 39 weights"):
        pair.open(other)
    answers = {}
    for file in files:
        result = CliRunner().invoke(app, ["probe", str(pair.folder), "--target", str(file), "--json"])
        assert result.exit_code in (0, 1), result.output
        answers[file] = result.stdout
    assert answers[files[0]] != answers[files[1]]


def test_init_writes_a_recipe_for_one(write: Write, tmp_path: Path) -> None:
    file = write("Q4_1")
    result = CliRunner().invoke(app, ["init", str(file), "--out", str(tmp_path / "my.yaml")])
    assert result.exit_code == 0, result.output
    assert f'path: "{file}"' in (tmp_path / "my.yaml").read_text()
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "my.yaml"), "--json"])
    assert result.exit_code == 0, result.output


def cut(file: Path, kept: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])


def overwrite(file: Path, place: int, count: int) -> None:
    content = bytearray(file.read_bytes())
    struct.pack_into("<Q", content, place, count)
    file.write_bytes(content)


DAMAGED: dict[str, Callable[[Path], None]] = {
    "without its end": lambda file: cut(file, 0.9),
    "without most of its header": lambda file: cut(file, 0.001),
    "empty": lambda file: cut(file, 0),
    "not one": lambda file: file.write_bytes(b"{}" * 100),
    "with endless tensors": lambda file: overwrite(file, 8, 2**60),
    "with endless values": lambda file: overwrite(file, 16, 2**60),
    "with an endless list": lambda file: overwrite(file, file.read_bytes().index(b"tokenizer.ggml.tokens") + 29, 2**60),
    "with an endless name": lambda file: overwrite(file, 24, 2**60),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_at_once(write: Write, damage: Callable[[Path], None]) -> None:
    file = write()
    damage(file)
    with pytest.raises(Refusal, match=r"model\.gguf: damaged, cut short, or no GGUF file"):
        Target.load(file)
    assert not models_folder().exists()


def test_an_architecture_that_is_not_dequantised_is_refused_by_its_name(write: Write) -> None:
    file = write()
    file.write_bytes(file.read_bytes().replace(b"llama", b"plamo"))
    with pytest.raises(IncompatibleError, match="architecture 'plamo' is none that transformers"):
        Target.load(file)


def test_stretched_positions_are_refused_as_transformers_leaves_them_out(write: Write) -> None:
    file = write(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0})
    with pytest.raises(IncompatibleError, match="stretches its rotary positions"):
        Target.load(file)


def test_more_layers_than_the_file_holds_take_no_memory(write: Write) -> None:
    file = write()
    key = b"llama.embedding_length"
    overwrite(file, file.read_bytes().index(key) + len(key), 4 | 2**20 << 32)  # of the kind uint32
    with pytest.raises(IncompatibleError, match="parameters by its sizes, and the file holds"):
        Target.load(file)


def test_a_file_without_a_tokenizer_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_models, "write_tokenizer", lambda *_: None)
    with pytest.raises(BadInputError, match="holds no tokenizer"):
        Target.load(write())


def test_one_of_several_in_a_folder_must_be_named(write: Write) -> None:
    file = write()
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(BadInputError, match=r"holds 2 \.gguf files, of which one can be named"):
        Target.load(file.parent)
