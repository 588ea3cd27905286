"""pair.json by itself: what is written, what protects it, and what is said of one that is damaged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.common import BadInputError
from outrider.decode import Plan, Sampling
from outrider.eval import Interval
from outrider.pair import Pair, verify
from outrider.pair.manifest import (
    DrafterRecord,
    Figure,
    FingerprintRecord,
    Lineage,
    Manifest,
    Measurements,
    PlanRecord,
    ProbeBaseline,
    Source,
    TargetRecord,
    inspect_manifest,
    read_manifest,
)
from outrider.targets import Fingerprint
from outrider.targets.fingerprint import digest_json

from ..eval.conftest import refusal


def fingerprint(**changes: Any) -> Fingerprint:
    return Fingerprint(
        **{"tensors": {"w": "1"}, "config": "2", "tokenizer": "3", "chat_template": None, "dtype": "float32"} | changes
    )


def target(tokenizer: str = "4", **changes: Any) -> TargetRecord:
    record = FingerprintRecord(**fingerprint(**changes).to_dict())
    return TargetRecord(fingerprint=record, source=Source(), tokenizer_files={"t.json": tokenizer})


def manifest(**changes: Any) -> Manifest:
    """A small pair.json: a chain of depth 3 that was not measured."""
    values = {
        "schema_version": 3,
        "name": "tiny",
        "version": 1,
        "digest": "",
        "target": target(),
        "drafter": DrafterRecord(type="ngram", files={"config.json": "5"}),
        "recipe": "6",
        "calibration": None,
        "reports": {},
        "plan": PlanRecord(depth=3),
        "created": "2026-01-01",
        "outrider_version": "0",
        "measurements": Measurements(headline=[], suites={}, conditions={}, baseline=None),
        "lineage": Lineage(parent=None, reason="first version"),
    }
    return Manifest(**values | changes).identified().sealed()


def test_what_a_pair_does_not_use_is_not_written():
    """So that a pair reads as it did before these fields were invented."""
    written = manifest().model_dump()
    assert written["plan"] == {"depth": 3, "verify": "auto"}
    assert set(written["target"]) == {"fingerprint", "source", "tokenizer_files"}
    assert "tuning" not in written
    target = manifest().target.model_copy(update={"adapter_files": {"a": "1"}})
    assert target.model_dump()["adapter_files"] == {"a": "1"}
    assert target.model_copy(update={"tokenizer_files": {}}).model_dump()["tokenizer_files"] == {}


def test_a_plan_comes_back_with_all_its_settings():
    tree = PlanRecord(depth=2, width=3, nodes=5, confidence=0.0, verify="coupled")
    assert tree.model_dump() == {"depth": 2, "width": 3, "nodes": 5, "verify": "coupled"}
    assert tree.restored() == Plan(2, width=3, nodes=5, verify="coupled")
    assert PlanRecord(depth=3, confidence=0.2).restored() == Plan(3, confidence=0.2)


def test_a_baseline_says_how_a_probe_samples():
    baseline = ProbeBaseline(max_new_tokens=4, temperature=0.7, seed=3, prompts=[])
    assert baseline.sampling() == Sampling(temperature=0.7, seed=3)


def test_a_condition_that_json_does_not_know_is_not_written():
    measurements = Measurements(headline=[], suites={}, conditions={"share": math.nan}, baseline=None)
    with pytest.raises(ValueError, match="JSON"):
        manifest().model_copy(update={"measurements": measurements}).to_text()


def test_numbers_that_json_does_not_know_become_null():
    assert Figure.of(Interval(1.5, math.nan, math.inf)) == Figure(value=1.5, low=None, high=None)
    assert Figure.of(Interval(1.5, -math.inf, 2)) == Figure(value=1.5, low=None, high=2.0)
    assert Figure.of(Interval(1.5, -math.inf, 2)).text("–") == "1.50", "one prompt gives no interval"
    assert Figure.of(Interval(1.5, 1, 2)).text("–", decimals=1) == "1.5 [1.0, 2.0]"
    assert Figure.of(None).text("–") == "–"


@pytest.mark.parametrize(
    "values",
    [
        {"value": math.nan, "low": None, "high": None},
        {"value": "1", "low": None, "high": None},
        {"value": None, "low": None},
    ],
)
def test_numbers_are_numbers(values):
    with pytest.raises(ValidationError):
        Figure(**values)


def test_the_file_is_readable_json_and_says_nothing_twice(tmp_path):
    made = manifest(name="schön")
    made.write(tmp_path)
    text = (tmp_path / "pair.json").read_text(encoding="utf-8")
    assert text == json.dumps(made.model_dump(), indent=2, ensure_ascii=False) + "\n"
    assert '\n  "name": "schön",\n' in text
    assert read_manifest(tmp_path) == made
    assert [f.name for f in tmp_path.iterdir()] == ["pair.json"]


def test_every_file_of_a_pair_is_listed_by_its_place():
    whole = manifest(calibration="7", reports={"2026-01-01/report.json": "8"})
    target = whole.target.model_copy(update={"adapter_files": {"adapter_config.json": "9"}})
    assert manifest().files() == {"recipe.yaml": "6", "drafter/config.json": "5", "tokenizer/t.json": "4"}
    assert whole.model_copy(update={"target": target}).files() == {
        "recipe.yaml": "6",
        "calibration.jsonl": "7",
        "reports/2026-01-01/report.json": "8",
        "drafter/config.json": "5",
        "tokenizer/t.json": "4",
        "adapter/adapter_config.json": "9",
    }


def test_the_identity_is_of_target_drafter_and_plan():
    others = [
        manifest(target=target(dtype="bfloat16")),
        manifest(drafter=DrafterRecord(type="ngram", files={"config.json": "0"})),
        manifest(plan=PlanRecord(depth=4)),
        manifest(target=target(tokenizer="5")),
    ]
    digest = manifest().digest
    assert len({digest, *(other.digest for other in others)}) == 5
    parts = {"drafter": {"config.json": "5"}, "plan": {"depth": 3, "verify": "auto"}, "kept": {"tokenizer/t.json": "4"}}
    assert digest == digest_json({"target": fingerprint().digest} | parts)
    assert digest == manifest(name="other", version=2, created="2031-01-01").identity()


def test_the_checksum_covers_every_field_but_itself():
    made = manifest()
    assert made.computed_checksum() == made.checksum == made.model_copy(update={"checksum": "?"}).computed_checksum()
    changed = dict.fromkeys(("name", "recipe", "calibration", "created", "outrider_version"), "x")
    changed |= {"version": 2, "reports": {"x": "y"}}
    others = {made.model_copy(update={key: value}).computed_checksum() for key, value in changed.items()}
    assert len(others | {made.checksum}) == len(changed) + 1


def test_each_kind_of_alteration_is_named_and_all_at_once(tmp_path):
    made = manifest()

    def found(altered: Manifest, text: str | None = None) -> list[str]:
        (tmp_path / "pair.json").write_text(altered.to_text() if text is None else text, encoding="utf-8")
        return inspect_manifest(tmp_path)[1]

    assert found(made) == []
    assert found(made.model_copy(update={"name": "x"})) == ["its content does not match its checksum"]
    assert found(made, made.to_text() + " ") == ["its bytes differ from the form it was written in"]
    files = made.model_copy(update={"drafter": made.drafter.model_copy(update={"files": {}})}).sealed()
    assert found(files) == ["the identity digest does not match target, drafter and plan"]
    other = made.target.fingerprint.model_copy(update={"digest": "0"})
    altered = made.model_copy(update={"target": made.target.model_copy(update={"fingerprint": other})}).sealed()
    assert found(altered) == ["the target's digest does not match the target's parts"]
    found(made.model_copy(update={"drafter": made.drafter.model_copy(update={"files": {}})}))
    assert refusal(read_manifest, tmp_path) == (
        f"{tmp_path / 'pair.json'}: its content does not match its checksum; "
        "the identity digest does not match target, drafter and plan. "
        "Take a good copy of the pair, or look closer with `outrider pair verify`."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"{",
            "damaged or not a pair (not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1)). Take a good copy of the pair.",
        ),
        (b"[]", "damaged or not a pair (expected an object, found list). Take a good copy of the pair."),
        (
            b"\xff",
            "damaged or not a pair ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte). "
            "Take a good copy of the pair.",
        ),
        (b'{"schema_version": 4}', "schema version 4 is newer than the 3 that this Outrider reads; upgrade Outrider."),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, content, message):
    (tmp_path / "pair.json").write_bytes(content)
    for call in (inspect_manifest, Pair.load):
        assert refusal(call, tmp_path) == f"{tmp_path / 'pair.json'}: {message}"
    assert verify(tmp_path) == [f"{tmp_path / 'pair.json'}: {message}"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_schema_that_has_the_same_identity_is_read(tmp_path, version):
    manifest(schema_version=version).write(tmp_path)
    assert inspect_manifest(tmp_path)[1] == []


def test_a_pair_whose_identity_did_not_cover_the_targets_files_is_refused_by_its_version(tmp_path):
    """Until 2026-11-22, under schema version 1: it is not altered."""
    early = manifest(schema_version=1)
    parts = {"target": early.target.fingerprint.digest, "drafter": early.drafter.files, "plan": early.plan.model_dump()}
    early.model_copy(update={"digest": digest_json(parts)}).sealed().write(tmp_path)
    for call in (inspect_manifest, Pair.load):
        assert "under the schema of before 2026-11-22" in refusal(call, tmp_path)


@pytest.mark.parametrize("version", ["2", 0, 1.5, None])
def test_a_schema_version_that_never_was_is_damage_and_not_the_future(tmp_path, version):
    (tmp_path / "pair.json").write_text(json.dumps({"schema_version": version}))
    with pytest.raises(BadInputError, match=r"damaged or not a pair \(schema_version: "):
        inspect_manifest(tmp_path)


def test_many_problems_are_named_in_their_places_and_cut_short(tmp_path):
    values = json.loads(manifest().to_text())
    values["plan"]["depth"], values["nmae"] = "3", 1
    (tmp_path / "pair.json").write_text(json.dumps(values))
    said = "(plan.depth: Input should be a valid integer; nmae: Extra inputs are not permitted)"
    for call in (inspect_manifest, Pair.load):
        assert said in refusal(call, tmp_path)
    (tmp_path / "pair.json").write_text(json.dumps({f"unknown{i}": i for i in range(20)}))
    said = refusal(inspect_manifest, tmp_path)
    assert said.startswith(f"{tmp_path / 'pair.json'}: damaged or not a pair (")
    problem = said.partition("not a pair (")[2].removesuffix("). Take a good copy of the pair.")
    assert len(problem) == 400
    assert problem.startswith("schema_version: Field required; name: Field required; ")


def test_no_pair_and_one_that_cannot_be_read_are_told_apart(tmp_path):
    for said in (
        f"no pair at {str(tmp_path)!r}: pair.json is missing there.",
        f"{tmp_path / 'pair.json'}: expected a regular file, found a folder.",
    ):
        assert refusal(inspect_manifest, tmp_path) == refusal(Pair.load, tmp_path) == said
        (tmp_path / "pair.json").mkdir(exist_ok=True)
    (recipe := tmp_path / "my.yaml").touch()
    assert refusal(inspect_manifest, recipe) == f"no pair at {str(recipe)!r}: pair.json is missing there."
