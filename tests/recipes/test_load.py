"""A recipe is checked as a whole before any work starts, quickly, and every fault is named with its place."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.recipes import Recipe, embedded_file, load_recipe, packaged_recipes

MINIMAL = """
name: small
target: {path: some/model}
drafter: {type: eagle3}
data: {prompts: [a.jsonl]}
"""


KEYS = "name, target, drafter, data, template, training, eval, output"
SOURCE = "path, weight, layout, column, split, revision, limit"
STATIC = "eval: a static tree has its own width and number of nodes; leave out width and nodes, or tree."


def write(folder: Path, text: str) -> str:
    file = folder / "my.yaml"
    file.write_text(text)
    return str(file)


def message_of(path: str, *overrides: str) -> str:
    with pytest.raises(BadInputError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_reading_a_recipe_imports_neither_torch_nor_transformers_and_takes_less_than_half_a_second() -> None:
    code = """
import sys, time
began = time.process_time()
from outrider.recipes import load_recipe
load_recipe("embedded-eagle3", ["data.limit=3"]).to_yaml()
print(time.process_time() - began)
assert not {"torch", "transformers", "datasets"} & set(sys.modules), "a heavy library was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # the first run may compile bytecode
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 0.5


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_name_only_settings_that_exist(name: str) -> None:
    from transformers import TrainingArguments

    from outrider.heads import drafter_config

    recipe = load_recipe(name)
    assert recipe.name == name
    drafter_config(recipe.drafter)
    assert set(recipe.training) <= {f.name for f in fields(TrainingArguments)} | {"packing", "max_length"}  # TRL's
    assert recipe.output_folder == Path("runs") / name


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.data.limit, recipe.data.max_new_tokens, recipe.data.features) == (None, 192, "online")
    assert recipe.eval.suites == ["code", "docs", "prose"]
    assert recipe.training == {}


def test_a_written_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe("embedded-eagle3", ["data.sampling.top_p=0.9", "drafter.init=somewhere"])
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize("change", ["data.requests={key: s3cret}", "data.requests.key=s3cret"])
def test_a_key_in_the_place_of_its_variables_name_is_not_printed(change: str) -> None:
    with pytest.raises(BadInputError, match="in capitals, never the key itself") as refused:
        load_recipe("embedded-eagle3", [change])
    assert "s3cret" not in str(refused.value)


def test_overrides_are_yaml_and_create_what_they_need(tmp_path: Path) -> None:
    training = ["training.learning_rate=3e-4", "training.report_to=none"]
    overrides = ["data.limit=12", "data.sampling.temperature=1", "eval.suites=[docs]", "output=x/{name}", *training]
    recipe = load_recipe(write(tmp_path, MINIMAL), overrides)
    assert (recipe.data.limit, recipe.data.sampling.temperature, recipe.eval.suites) == (12, 1.0, ["docs"])
    assert recipe.training == {"learning_rate": 3e-4, "report_to": "none"}
    assert recipe.output_folder == Path("x/small")
    assert load_recipe(write(tmp_path, MINIMAL), ["data.limit=1", "data.limit=null"]).data.limit is None, "later wins"


def test_a_static_tree_decides_the_depth_and_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL), ["eval.tree=[-1,-1,0]"])
    assert (recipe.eval.tree, recipe.eval.depth) == ([-1, -1, 0], 2)
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.limt=3", "unknown key data.limt; did you mean data.limit?"),
        ("data.sampling.temprature=1", "unknown key data.sampling.temprature; did you mean data.sampling.temperature?"),
        ("trainning={}", "unknown key trainning; did you mean training?"),
        ("top_p=0.5", "unknown key top_p; did you mean data.sampling.top_p?"),
        (
            "target.xyz=1",
            "unknown key target.xyz; known keys here: path, revision, adapter, dtype, trust_remote_code, sharding, "
            "quantize, engine, allow_changed.",
        ),
        ("data.limit=many", "data.limit: expected an integer or null, found 'many'."),
        ("data.limit=true", "data.limit: expected an integer or null, found True."),
        ("data.limit='3'", "data.limit: expected an integer or null, found '3'."),
        ("data.limit=0", "data.limit: expected a value >= 1, found 0."),
        ("data.holdout=1", "data.holdout: expected a value < 1.0, found 1."),
        ("data.sampling.top_p=0", "data.sampling.top_p: expected a value > 0.0, found 0."),
        ("data.sampling.temperature=.nan", "data.sampling.temperature: expected"),
        ("eval.temperatures=[1.0e-38]", "expected 0 (greedy), or from 0.0001 to 10000, found 1e-38"),
        ("data.prompts=[]", "data.prompts: expected at least one entry, found []."),
        ("data.prompts=a.jsonl", "data.prompts: expected a list, found 'a.jsonl'."),
        ("data.prompts=[a, 3]", f"data.prompts[1]: expected text or a mapping with the keys {SOURCE}, found 3."),
        ("data=null", "data: expected a mapping with the keys prompts, limit,"),
        ("data.features=disk", "data.features: expected one of 'online', 'cached', 'engine', found 'disk'."),
        ("eval.temperatures=[0, hot]", "eval.temperatures[1]: expected a number, found 'hot'."),
        ("target.trust_remote_code=1", "target.trust_remote_code: expected true or false, found 1."),
        ("training=[1]", "training: expected a mapping, found [1]."),
        ("training={1: 2}", "training[1].[key]: expected text, found 1."),
        ("name=a/b", "name: expected at most 100 letters, digits, '.', '_' and '-', found 'a/b'."),
        (f"name={'a' * 101}", "name: expected at most 100 letters"),
        *((f"eval.{once}", "expected each entry once, found") for once in ("suites=[code, code]", "baselines=[a, a]")),
        ("eval.temperatures=[0, 0.0]", "eval.temperatures: expected each entry once, found 0.0 twice."),
        ("data.prompts=[{path: a.jsonl, limit: 2}, {path: a.jsonl, limit: 2}]", "once, found a.jsonl twice."),
        ("data.servers=['http://h/v1', 'http://h/v1']", "data.servers: expected each entry once, found http://h/v1"),
        ("data.requests.retries=2", "data: requests are settings for servers, and there are none"),
        ("data.sampling.repetition_penalty=1e30", "repetition_penalty: expected a value <= 100"),
        ("template={a: [.nan]}", "template: expected a finite number, found nan."),
        ("output=''", "output: expected some text, found ''."),
        ("eval.tree=[-1, 2]", "eval.tree: a tree's nodes come after their parents; node 1 has parent 2."),
        ("eval.tree=[-1, 0, -1]", "a tree's nodes come level by level; the depths of [-1, 0, -1] are [1, 2, 1]."),
        ("eval.tree=[]", "eval.tree: a tree needs at least one node."),
        ("eval.tree=[-1, a]", "eval.tree[1]: expected an integer, found 'a'."),
        ("eval={tree: [-1], width: 2}", STATIC),
        ("eval={tree: [-1], nodes: 2}", STATIC),
        *((f"data.on_policy={share}", "data.on_policy: expected") for share in (1.5, -0.1, "true", "half")),
        (
            "data.on_policy=0.5 & data.features=cached",
            "it has no stored features; leave out features: cached",
        ),
        (
            "data.features_dtype=bfloat16",
            "data: features_dtype is how features are stored, and those of features: online",
        ),
        ("eval.patience=2", "eval: patience waits for a better measured τ; set"),
        (
            "target.engine={python: /opt/vllm}",
            "target.engine makes hidden states before the training (data.features: cached), or meanwhile",
        ),
        ("target.engine={}", "target.engine: give either url, of an engine that runs, or python"),
        ("target.engine={url: http://gpu1:8000}", "needs folder: where it writes the states"),
        ("target.engine={python: /opt/vllm} & target.adapter=mine", "merge the adapter, or name the quantised model"),
        ("data.limit", "expected key.path=value"),
        ("data..limit=3", "expected key.path=value"),
        ("name.x=3", "name is 'small', not a mapping"),
        ("data.prompts=[", "not valid YAML: line 1, column 2"),
    ],
)
def test_a_fault_is_named_with_its_place_and_what_was_expected(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in message_of(write(tmp_path, MINIMAL), *override.split(" & "))


def test_all_faults_are_reported_at_once_with_the_file(tmp_path: Path) -> None:
    lines = message_of(write(tmp_path, MINIMAL + "eval: {dept: 3}\noutput: 7\n")).splitlines()
    assert lines == [
        "my.yaml: unknown key eval.dept; did you mean eval.depth?",
        "my.yaml: output: expected text, found 7.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\ndrafter: {}\ndata: {prompts: [a]}\n", "target is missing; expected a mapping with the keys path, r"),
        ("name: a\n  b: c\n", "my.yaml: not valid YAML: line 2, column 4"),
        ("name: a\ndata: [1\n", "line 3, column 1"),
        ("name: a\nname: b\n", "line 2, column 1: the key 'name' stands here twice"),
        ("name: !!python/object/apply:os.getcwd []\n", "line 1, column 7"),
        ("- a\n", f"expected a mapping with the keys {KEYS}; found a list"),
        ("", "found nothing"),
    ],
)
def test_broken_yaml_is_reported_with_line_and_column_and_a_missing_section_named(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert expected in message_of(write(tmp_path, text))


def test_what_is_no_file_of_text_is_refused_and_a_missing_one_named_with_the_packaged_ones(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in message_of(str(tmp_path / "my.yaml"))
    assert "is a folder" in message_of(str(tmp_path))
    assert "no such file; packaged recipes: embedded-eagle3, " in message_of(str(tmp_path / "embeded-eagle3.yaml"))
    assert "packaged recipes: embedded-dflash, " in message_of("zzz")
    assert message_of("runs/pair-v1").startswith("no recipe and no pair at 'runs/pair-v1'")


def test_a_recipe_from_a_mapping_is_validated_alike() -> None:
    values = {"name": "a", "target": {"path": "m"}, "drafter": {"type": "ngram"}, "data": {"prompts": ["a.jsonl"]}}
    assert Recipe.from_dict(values).data.batch_size == 32
    with pytest.raises(BadInputError, match="unknown key date; did you mean data"):
        Recipe.from_dict(values | {"date": {}})


def test_a_missing_embedded_file_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"no embedded file 'suites/poetry\.jsonl'"):
        embedded_file("suites/poetry.jsonl")


@pytest.mark.parametrize(
    "url", ["http://user:pw5678@host:8000", "http://host/v1?api_key=pw5678", "http://host#pw5678", "host:pw5678"]
)
def test_an_address_of_a_server_that_may_hold_a_secret_is_refused_without_repeating_it(url: str) -> None:
    values = {"name": "t", "target": {"path": "p"}, "drafter": {}, "data": {"prompts": ["a"], "servers": [url]}}
    with pytest.raises(BadInputError, match=r"data\.servers\[0\]\.url: .*address") as refused:
        Recipe.from_dict(values)
    assert "pw5678" not in str(refused.value)


def test_addresses_of_servers_are_taken() -> None:
    for url in ("http://gpu1:8000/v1", "https://[::1]:8000", "http://127.0.0.1:9", "https://api.example.org/a@b/v1/"):
        data = {"prompts": ["a"], "servers": [url]}
        Recipe.from_dict({"name": "t", "target": {"path": "p"}, "drafter": {}, "data": data})
