"""Attempts to run code through every file that a verb reads. Each writes a file if it ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from world import Attempt, reseal

MARK = "IT-RAN"

Commands = list[list[str]]


def of_world(plant: Callable[..., None]) -> Callable[..., Callable[[Path], None]]:
    """Return `plant` as a function of all but the world, which returns a function of that."""
    return lambda *given, **named: lambda world: plant(world, *given, **named)


class _Bomb:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.mark}",))


def code(world: Path) -> str:
    """Return Python that leaves the mark, whatever is asked of it."""
    return (
        f"open({str(world / MARK)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Evil(LlamaForCausalLM): pass\nclass EvilConfig(LlamaConfig): pass\n"
        "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
        "def generate(*a, **k): pass\ndef forward(*a, **k): pass\n"
    )


def pickled(world: Path) -> bytes:
    return pickle.dumps({"weight": _Bomb(world / MARK)})


def edit(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | changes))


def torch_zip(file: Path, content: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


# Verbs by what they read. Short ones: each attempt costs a second or two.
READ_TARGET = [["distill", "eagle.yaml", "output=new"], ["plan", "eagle.yaml"]]
READ_PAIR_TARGET = [
    ["generate", "pair-eagle", "def", "--max-new-tokens", "4", "--no-compare"],
    ["pair", "verify", "pair-eagle", "--target", "target"],
    ["probe", "pair-eagle", "--target", "target"],
]
ADAPTED = [["probe", "pair-eagle", "--target", "target", "--adapter", "adapter"]]
CHAT = [["generate", "pair-eagle", "def", "--chat", "--max-new-tokens", "4", "--no-compare"]]


def read_pair(name: str) -> Commands:
    return [
        ["pair", "verify", name],
        ["pair", "show", name],
        ["generate", name, "def", "--max-new-tokens", "4", "--no-compare"],
        ["eval", name, "--limit", "1"],
        ["probe", name, "--target", "target"],
    ]


def attempts() -> Iterator[Attempt]:
    """Yield every attempt."""
    for attack in (_auto_map, _pickles, _tags, _templates, _adapters, _names, _modules, _rows):
        yield from attack()


_MAPS: dict[str, dict[str, Any]] = {
    "config": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil", "AutoModel": "evil.Evil"},
    "tokenizer": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
}


def _auto_map() -> Iterator[Attempt]:
    folders: dict[str, Commands] = {
        "target": READ_TARGET + READ_PAIR_TARGET,
        "small": [["train", "draft.yaml", "output=new"], ["plan", "draft.yaml"]],
        "run-draft/drafter": [["eval", "draft.yaml", "--limit", "1"], ["pair", "new", "p", "draft.yaml"]],
        "pair-draft/drafter": read_pair("pair-draft"),
        "pair-eagle/tokenizer": read_pair("pair-eagle"),
        "adapter": ADAPTED,
    }
    for folder, commands in folders.items():
        more = ("custom_generate", "processor") if folder in ("target", "pair-draft/drafter") else ()
        for variant in ("tokenizer", "tokenizer_class", "config", "model_type", "elsewhere", "both", *more):
            yield Attempt(f"code as {variant} in {folder}", _planted(folder, variant), commands)
    yield Attempt("auto_map in an MTP layer", _mtp_layer, read_pair("pair-mtp"))
    for name, commands in {"target": READ_TARGET, "pair-eagle/tokenizer": read_pair("pair-eagle")}.items():
        for place in ("question_encoder_tokenizer", "generator_tokenizer"):
            yield Attempt(f"auto_map in {place} of a tokenizer of two in {name}", _rag(name, place), commands)


@of_world
def _planted(world: Path, folder: str, variant: str) -> None:
    here = world / folder
    (here / "evil.py").write_text(code(world))
    reference = f"{here}--evil." if variant == "elsewhere" else "evil."
    maps = {k: json.loads(json.dumps(v).replace("evil.", reference)) for k, v in _MAPS.items()}
    if variant in ("tokenizer", "tokenizer_class", "elsewhere", "both"):
        kind = {"tokenizer_class": "EvilTokenizer"} if variant != "tokenizer" else {}
        edit(here / "tokenizer_config.json", auto_map=maps["tokenizer"], **kind)
    if variant in ("config", "model_type", "elsewhere", "both"):
        kind = {"model_type": "evil", "architectures": ["Evil"]} if variant == "model_type" else {}
        edit(here / "config.json", auto_map=maps["config"] | maps["tokenizer"], **kind)
    if variant == "custom_generate":
        (here / variant).mkdir()
        (here / variant / "generate.py").write_text(code(world))
        (here / variant / "requirements.txt").write_text("")
    for name in ("processor", "preprocessor", "video_preprocessor") if variant == "processor" else ():
        edit(here / f"{name}_config.json", auto_map={"AutoProcessor": "evil.Evil"}, processor_class="Evil")
    _resealed(world, folder)


def _resealed(world: Path, folder: str) -> None:
    if folder.startswith("pair-"):
        reseal(world / folder.partition("/")[0])


@of_world
def _rag(world: Path, folder: str, place: str) -> None:
    """Plant a tokenizer that loads two others itself, without saying whether code may run."""
    here = world / folder
    for name in ("question_encoder_tokenizer", "generator_tokenizer"):
        shutil.copytree(world / "small", here / name, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        (here / name / "evil.py").write_text(code(world))
    (here / "evil.py").write_text(code(world))
    edit(here / place / "tokenizer_config.json", auto_map=_MAPS["tokenizer"], tokenizer_class="EvilTokenizer")
    edit(here / "tokenizer_config.json", tokenizer_class="RagTokenizer")
    if folder != "target":
        parts = {"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}}
        edit(here / "config.json", model_type="rag", **parts)
    _resealed(world, folder)


def _mtp_layer(world: Path) -> None:
    file = world / "pair-mtp" / "drafter" / "config.json"
    (file.parent / "evil.py").write_text(code(world))
    values = json.loads(file.read_text())
    values["layer"] |= {"auto_map": _MAPS["config"], "_name_or_path": str(file.parent)}
    file.write_text(json.dumps(values))
    reseal(world / "pair-mtp")


def _pickles() -> Iterator[Attempt]:
    """Pickles under every name that a library looks for, plain and as torch packs them, and in the place of weights."""
    weights = {
        "target/model.safetensors": ("target/pytorch_model.bin", READ_TARGET),
        "small/model.safetensors": ("small/pytorch_model.bin", [["train", "draft.yaml", "output=new"]]),
        "pair-eagle/drafter/model.safetensors": ("pair-eagle/drafter/pytorch_model.bin", read_pair("pair-eagle")),
        "pair-draft/drafter/model.safetensors": ("pair-draft/drafter/pytorch_model.bin", read_pair("pair-draft")),
        "adapter/adapter_model.safetensors": ("adapter/adapter_model.bin", ADAPTED),
    }
    for file, (other, commands) in weights.items():
        for packed in (False, True):
            kind = "torch file" if packed else "pickle"
            yield Attempt(f"{kind} {other}", _pickle_in(other, packed, instead_of=file), commands)
            yield Attempt(f"{kind} as {file}", _pickle_in(file, packed), commands)
    again = [["train", "eagle.yaml", "training.max_steps=3"], ["train", "eagle.yaml"]]
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"):
        for packed in (False, True):
            plant = _pickle_in(f"run-eagle/checkpoints/*/{name}", packed, unseal=True)
            yield Attempt(f"{'torch file' if packed else 'pickle'} {name} in a checkpoint", plant, again)
    for name in ("data/*.arrow", "data/state.json", "data/dataset_info.json", "data/provenance.json"):
        yield Attempt(f"pickle as {name}", _pickle_in(f"run-eagle/{name}", False, unseal=True), again)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.pkl", "spiece.model", "merges.txt"):
        yield Attempt(f"pickle as {name}", _pickle_in(f"target/{name}", False), READ_TARGET)


@of_world
def _pickle_in(world: Path, place: str, packed: bool, instead_of: str | None = None, unseal: bool = False) -> None:
    from outrider.common.digests import seal

    for file in list(world.glob(place)) or [world / place.replace("*", "x")]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        torch_zip(file, pickled(world)) if packed else file.write_bytes(pickled(world))
        if unseal:  # a stranger leaves the list of digests out, or writes it anew
            for listed in (file.parent / "SHA256SUMS", world / "run-eagle" / "data" / "SHA256SUMS"):
                if listed.exists():
                    seal(listed.parent)
    if instead_of is not None:
        (world / instead_of).unlink()
    _resealed(world, place)


def _tags() -> Iterator[Attempt]:
    values = [
        "!!python/object/apply:os.system ['touch {mark}']",
        "!!python/object/apply:subprocess.check_output [[touch, {mark}]]",
        "!!python/object/new:os.system ['touch {mark}']",
        "!!python/object/apply:builtins.exec [\"open('{mark}', 'w')\"]",
        "!!python/object/apply:builtins.eval [\"open('{mark}', 'w')\"]",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]",
        "!!python/object/new:type {{args: [x, !!python/tuple [], {{'extend': !!python/name:exec }}], "
        "listitems: \"open('{mark}', 'w')\"}}",
        "!!python/module:evil",
        "!!python/name:evil.Evil",
        "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {mark}']",
    ]
    for number, value in enumerate(values):
        for place in ("recipe", "drafter", "key", "override", "pair", "accelerate"):
            refresh = ["refresh", "pair-eagle", "--target", "target", "--out", "r"]
            commands = {
                "override": [["plan", "eagle.yaml", "data.limit=" + value.format(mark=MARK)]],
                "pair": [["eval", "pair-eagle", "--limit", "1"], refresh],
                "accelerate": [["plan", "eagle.yaml", "--accelerate-config", "accelerate.yaml"]],
            }.get(place, [["plan", "eagle.yaml"]])
            yield Attempt(f"YAML tag {number} in {place}", _tagged(place, value), commands)


@of_world
def _tagged(world: Path, place: str, value: str) -> None:
    (world / "evil.py").write_text(code(world))
    text = value.format(mark=world / MARK)
    line = {"key": f"? {text}\n: 1\n", "drafter": f"training: {{x: {text}}}\n"}.get(place, f"more: {text}\n")
    name = {"pair": "pair-eagle/recipe.yaml", "accelerate": "accelerate.yaml"}.get(place, "eagle.yaml")
    if place != "override":
        with (world / name).open("a") as opened:
            opened.write(line)
    _resealed(world, name)


_PAYLOADS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ namespace.__init__.__globals__.os.system('touch MARK') }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c('touch MARK', shell=True) }}{% endfor %}",
    "{{ messages.__class__.__mro__[-1].__subclasses__()[100] }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{{ strftime_now.__globals__['os'].system('touch MARK') }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('%s' % messages).__class__.__init__.__globals__ }}",
    "{% include 'MARK' %}{% import 'evil' as e %}",
    "{{ tojson.__globals__ }}{{ messages|map('attr', '__class__')|list }}",
    "{{ [].append.__self__.__class__.__subclasses__ }}{{ messages.append(1) }}",
    "{{ joiner.__init__.__globals__['__loader__'].load_module('os').system('touch MARK') }}",
]


def _templates() -> Iterator[Attempt]:
    chats = ["distill", "eagle.yaml", "output=new", "data.prompts=[chats.jsonl]"]
    for number, payload in enumerate(_PAYLOADS):
        for place in ("chat_template.jinja", "tokenizer_config.json", "pair"):
            folder = "pair-eagle/tokenizer" if place == "pair" else "target"
            commands = [*CHAT, chats] if place != "pair" else [*CHAT, ["probe", "pair-eagle", "--target", "target"]]
            yield Attempt(f"template {number} in {place}", _templated(folder, place, payload), commands)


@of_world
def _templated(world: Path, folder: str, place: str, payload: str) -> None:
    text = payload.replace("MARK", str(world / MARK))
    if place == "tokenizer_config.json":
        (world / folder / "chat_template.jinja").unlink(missing_ok=True)
        edit(world / folder / place, chat_template=text)
    else:
        (world / folder / "chat_template.jinja").write_text(text)
    _resealed(world, folder)


def _adapters() -> Iterator[Attempt]:
    changes: dict[str, dict[str, Any]] = {
        "megatron": {"megatron_config": {"x": 1}, "megatron_core": "evil"},
        "megatron alone": {"megatron_core": "evil"},
        "prompt tuning": {
            "peft_type": "PROMPT_TUNING",
            "prompt_tuning_init": "TEXT",
            "prompt_tuning_init_text": "x",
            "num_virtual_tokens": 2,
            "tokenizer_name_or_path": "evil",
            "tokenizer_kwargs": {"trust_remote_code": True},
        },
        "corda": {"init_lora_weights": "corda", "corda_config": {"cache_file": "evil.pt"}},
        "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": {"cache_file": "evil.pt"}},
        "eva": {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        "x-lora": {"peft_type": "XLORA", "adapters": {"a": "evil"}},
        "auto_mapping": {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}, "task_type": None},
        "base model": {"base_model_name_or_path": "evil"},
        "runtime": {"runtime_config": {"ephemeral_gpu_offload": "evil"}},
        "arrow": {"arrow_config": {"task_adapter_names": ["evil"]}},
        "peft type": {"peft_type": "evil.Evil"},
    }
    for name, change in changes.items():
        for place in ("probe", "recipe", "pair", "beside"):
            commands = {
                "probe": ADAPTED,
                "recipe": [["distill", "eagle.yaml", "target.adapter=adapter", "output=new"]],
                "pair": read_pair("pair-eagle"),
                "beside": READ_TARGET,
            }[place]
            yield Attempt(f"adapter {name}, {place}", _adapted(place, change), commands)


@of_world
def _adapted(world: Path, place: str, change: dict[str, Any]) -> None:
    (world / "evil.py").write_text(code(world))
    torch_zip(world / "evil.pt", pickled(world))
    shutil.copytree(world / "target", world / "evil")
    edit(world / "evil" / "tokenizer_config.json", auto_map=_MAPS["tokenizer"])
    (world / "evil" / "evil.py").write_text(code(world))
    edit(world / "adapter" / "adapter_config.json", **change)
    if place == "pair":
        shutil.copytree(world / "adapter", world / "pair-eagle" / "adapter")
        reseal(world / "pair-eagle")
    if place == "beside":
        for file in (world / "adapter").iterdir():
            shutil.copy(file, world / "target")


def _names() -> Iterator[Attempt]:
    evil = "__import__('os').system('touch MARK')"
    configs = [
        {"model_type": "evil"},
        {"model_type": "../evil"},
        {"architectures": ["evil.Evil"]},
        {"torch_dtype": evil, "dtype": evil},
        {"hidden_act": evil},
        {"attn_implementation": "evil/kernel:forward", "_attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"_experts_implementation": "evil/kernel"},
        {"quantization_config": {"quant_method": "evil", "x": evil}},
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": "evil", "_data": {}}}}},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"quantization_config": {"quant_method": "compressed-tensors", "format": evil}},
        {"rope_scaling": {"rope_type": evil, "factor": 2.0}},
        {"rope_parameters": {"rope_type": evil}},
        {"transformers_weights": "../evil.safetensors"},
        {"_name_or_path": "evil", "name_or_path": "evil"},
        {"generation_config": evil, "tie_word_embeddings": evil},
        {"text_config": {"model_type": "evil", "auto_map": _MAPS["config"]}},
    ]
    for number, change in enumerate(configs):
        yield Attempt(f"config {number} of a target", _configured("target", change), READ_TARGET)
        draft = _configured("pair-draft/drafter", change)
        yield Attempt(f"config {number} of a draft model", draft, read_pair("pair-draft"))
    tokenizers = [
        {"tokenizer_class": "evil.Evil"},
        {"tokenizer_class": "os.system", "vocab_file": "evil.py"},
        {"tokenizer_file": "../evil.py", "name_or_path": "evil"},
        {"extra_special_tokens": {"__reduce__": evil}},
        {"added_tokens_decoder": {"0": {"content": evil, "__type": "evil"}}},
        {"eos_token": {"__type": "AddedToken", "content": evil}},
        {"tokenizer_class": "RagTokenizer"},
        {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab", "mecab_kwargs": {"x": evil}},
    ]
    for number, change in enumerate(tokenizers):
        plant = _configured("target", change, "tokenizer_config.json")
        yield Attempt(f"tokenizer_config {number}", plant, READ_TARGET)
        pair = _configured("pair-eagle/tokenizer", change, "tokenizer_config.json")
        yield Attempt(f"tokenizer_config {number} of a pair", pair, read_pair("pair-eagle"))
    drafters = [
        {"drafter_type": "os"},
        {"drafter_type": "../evil"},
        {"drafter_type": "fusion", "statistical": {"type": "evil"}},
        {"drafter_type": "cascade", "model": "../../evil"},
        {"loss": evil},
        {"drafter_type": "draft_model", "path": "evil", "init": "pretrained"},
        {"drafter_type": "mtp", "init": "native", "path": "evil"},
        {"__class__": evil},
    ]
    for number, change in enumerate(drafters):
        yield Attempt(f"drafter config {number}", _configured("pair-eagle/drafter", change), read_pair("pair-eagle"))


@of_world
def _configured(world: Path, folder: str, change: dict[str, Any], name: str = "config.json") -> None:
    (world / "evil.py").write_text(code(world))
    shutil.copytree(world / "target", world / "evil")
    (world / "evil" / "evil.py").write_text(code(world))
    (world / folder / "evil.py").write_text(code(world))
    edit(world / folder / name, **json.loads(json.dumps(change).replace("MARK", str(world / MARK))))
    _resealed(world, folder)


def _modules() -> Iterator[Attempt]:
    """Modules in the folder where a command runs, under names that libraries import if they find them."""
    names = ("sitecustomize", "kernels", "bitsandbytes", "flash_attn", "apex", "megatron", "mistral_common", "torchao")
    for name in names:
        yield Attempt(f"module {name} where the command runs", _module(name), [*READ_TARGET[:1], *CHAT])


@of_world
def _module(world: Path, name: str) -> None:
    (world / f"{name}.py").write_text(code(world))
    (world / "target" / f"{name}.py").write_text(code(world))


def _rows() -> Iterator[Attempt]:
    """Rows of prompts, reports and pairs whose text looks like code."""
    evil = "__import__('os').system('touch MARK')"
    rows = [
        {"text": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}"},
        {"text": evil, "id": evil, "suite": evil},
        {"messages": [{"role": "user", "content": "x", "__class__": evil}], "tools": [{"name": evil}]},
        {"prompt": "$(touch MARK) `touch MARK`", "id": "; touch MARK"},
        {"text": "!!python/object/apply:os.system ['touch MARK']"},
    ]
    for number, row in enumerate(rows):
        commands = [["distill", "eagle.yaml", "output=new"], ["eval", "pair-eagle", "--limit", "1"]]
        yield Attempt(f"prompt {number}", _prompted(row), commands)
    for suffix in ("parquet", "json", "txt", "pkl", "py", "csv"):
        commands = [["distill", "eagle.yaml", "output=new", f"data.prompts=[prompts.{suffix}]"]]
        yield Attempt(f"pickle as prompts.{suffix}", _pickle_in(f"prompts.{suffix}", False), commands)
    commands = [["distill", "eagle.yaml", "output=new", "data.prompts=[org/name]"]]
    yield Attempt("a data set's script in a folder", _script, commands)
    for key in ("name", "drafter", "version", "command"):
        commands = [["gate", "report", "--against", "report"], ["pair", "new", "p", "eagle.yaml", "--report", "report"]]
        yield Attempt(f"report with code as {key}", _reported(key), commands)


@of_world
def _prompted(world: Path, row: dict[str, Any]) -> None:
    text = json.dumps(row).replace("MARK", str(world / MARK)) + "\n"
    (world / "prompts.jsonl").write_text(text * 3)


def _script(world: Path) -> None:
    (world / "org" / "name").mkdir(parents=True)
    (world / "org" / "name" / "name.py").write_text(code(world))
    readme = "---\nconfigs: [{config_name: default, data_files: x.pkl}]\n---\n"
    (world / "org" / "name" / "README.md").write_text(readme)
    (world / "org" / "name" / "x.pkl").write_bytes(pickled(world))


@of_world
def _reported(world: Path, key: str) -> None:
    evil = "{{ cycler.__init__.__globals__.os.system('touch " + str(world / MARK) + "') }}"
    values = json.loads((world / "report" / "report.json").read_text())
    (world / "report" / "report.json").write_text(json.dumps(_replaced(values, key, evil)))


def _replaced(values: Any, key: str, text: str) -> Any:
    if isinstance(values, dict):
        return {k: text if k == key and isinstance(v, str) else _replaced(v, key, text) for k, v in values.items()}
    return [_replaced(v, key, text) for v in values] if isinstance(values, list) else values
