"""What earlier versions wrote is read, and computes the same; or it is refused by the version that wrote it.

`DATE.tar.xz` holds files of the commit of that day, made by make.py: a set that is there is never made anew.
"""

from __future__ import annotations

import json
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.distill import FeatureStore, load_responses, provenance
from outrider.eval import Report
from outrider.heads import drafter_config, load_drafter
from outrider.heads.saved import GONE
from outrider.pair import Pair, probe, verify
from outrider.pair.registry import open_registry
from outrider.recipes import load_recipe
from outrider.recipes.schema import GONE as GONE_KEYS
from outrider.targets import Target
from outrider.train import train
from outrider.train.provenance import read_provenance

from ..conftest import installed
from .make import loss_of

SETS = sorted(Path(__file__).parent.glob("*.tar.xz"))


@pytest.fixture(params=SETS, ids=lambda file: file.name.partition(".")[0])
def files(request, tmp_path, monkeypatch):
    folder = tmp_path / request.param.name.partition(".")[0]  # a recipe's prompts are named after their folder
    with tarfile.open(request.param) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python 3.11.3 lacks
        archive.extractall(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def target(files):
    return Target.load(files / "target")


def test_drafters_of_every_type_have_the_loss_that_they_had(files, target):
    expected = json.loads((files / "drafters" / "losses.json").read_text())
    assert len(expected) >= 14
    for kind, loss in installed(expected).items():
        drafter = load_drafter(files / "drafters" / kind, target)
        assert drafter.name == kind
        if loss is not None:
            assert loss_of(drafter, target) == pytest.approx(loss, rel=1e-4), kind
    for kind in ("fusion", "low_rank"):
        drafter = load_drafter(files / "drafters" / kind, target)
        assert len(Decoder(target, drafter, Plan(depth=2)).generate([[5, 6, 7]], max_new_tokens=4).tokens[0]) == 4


def test_a_pair_is_whole_and_probes_as_it_did(files, target):
    assert verify(files / "pair") == []
    pair = Pair.load(files / "pair")
    assert pair.manifest.tuning
    result = probe(pair, target)
    assert result.verdict == "fresh"
    assert result.tau == result.tau_baseline
    assert result.alpha.value == pytest.approx(result.alpha_baseline.value, rel=1e-4)


def test_reports_runs_stores_and_registries_are_read(files, tmp_path):
    assert Report.load(files / "run" / "report").overall(0.0)
    assert read_provenance(files / "run")["target"]["digest"] == provenance(files / "run" / "data")["target"]["digest"]
    assert load_responses(files / "run" / "data").num_rows == 3
    (pushed,) = open_registry(str(files / "registry")).versions()
    assert pushed.manifest.digest == Pair.load(files / "pair").digest


def test_a_finished_run_is_known_and_its_stored_states_are_used(files):
    before = {file: file.read_bytes() for file in (files / "run" / "features").rglob("*.safetensors")}
    train(load_recipe("tiny.yaml"))
    assert {file: file.read_bytes() for file in (files / "run" / "features").rglob("*.safetensors")} == before


@pytest.mark.parametrize("name", GONE)
def test_a_setting_that_went_is_dropped_where_it_was_off_and_refused_where_it_was_on(name, caplog):
    off, last_day = GONE[name]
    caplog.set_level("INFO")
    assert drafter_config({"type": "eagle1", name: off}) == drafter_config({"type": "eagle1"})
    assert f"drafter: read without {name}: settings of earlier versions, which were off." in caplog.text
    with pytest.raises(BadInputError, match=rf"drafter\.{name}: .* had until {last_day}, .* Outrider of that day"):
        drafter_config({"type": "eagle1", name: "else"})


@pytest.mark.parametrize("key", GONE_KEYS)
def test_a_recipe_key_that_went_is_dropped_where_it_was_off_and_refused_where_it_was_on(key):
    off, last_day, advice = GONE_KEYS[key]
    plain = load_recipe("embedded-eagle3")
    assert load_recipe("embedded-eagle3", changes={key: off}) == plain
    with pytest.raises(BadInputError, match=rf"{key} is a key that Outrider had until {last_day}\. {advice[:15]}"):
        load_recipe("embedded-eagle3", [f"{key}=0.25"])


def test_a_name_that_went_from_one_drafter_stays_a_setting_of_another():
    assert drafter_config({"type": "dflash", "weighting": "dpace"})[1].weighting == "dpace"


def test_a_drafter_names_the_versions_that_wrote_it_and_a_later_schema_is_refused(tmp_path):
    drafter_config({"type": "ngram"})[0]().save(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    assert (values["schema_version"], values["outrider_version"]) == (1, version("outrider"))
    file.write_text(json.dumps(values | {"schema_version": 2, "outrider_version": "9.9"}))
    with pytest.raises(BadInputError, match=r"schema version 2, written by Outrider 9\.9; this one reads 1\. Upgrade"):
        load_drafter(tmp_path)


def test_a_store_of_a_later_schema_is_refused_by_its_version(tmp_path):
    (tmp_path / "features.json").write_text(json.dumps({"schema_version": 2, "outrider_version": "9.9"}))
    with pytest.raises(BadInputError, match=r"schema version 2, written by Outrider 9\.9; this one reads 1\."):
        FeatureStore(tmp_path, check=False)


@pytest.mark.parametrize("stamped", [False, True])
def test_tensors_under_other_names_are_of_an_earlier_version_where_none_is_named(tiny_target, tmp_path, stamped):
    head, config = drafter_config({"type": "medusa"})
    head.build(config, tiny_target).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"old.{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in values.items() if stamped or "version" not in k}))
    with pytest.raises(IncompatibleError, match=r"does not fit its config\.json") as raised:
        load_drafter(tmp_path)
    assert ("an Outrider of before 2026-11-28 wrote it" in str(raised.value)) is not stamped
