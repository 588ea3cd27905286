"""The three doors of docs/security.md, and that nothing goes round them: each is the one place with limits."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import outrider.common

HOUSE = Path(outrider.common.__file__).resolve().parents[1]


@cache
def shipped() -> dict[str, set[str]]:
    """Return what each file of the package calls and imports."""
    rooms = [room for room in HOUSE.iterdir() if (room / "py.typed").is_file() or room.name in ("recipes", "scripts")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    assert len(files) > 100
    return {file.relative_to(HOUSE).as_posix(): set(used(file.read_text(encoding="utf-8"))) for file in files}


def used(source: str) -> Iterator[str]:
    """Yield the functions that are named, as they are written and by their whole names, and methods as `.read_text`.

    Of imports, yield the names as `import httpx`, and of classes their bases as `class of BaseModel`.
    """
    tree, whole = ast.parse(source), dict[str, str]()  # the whole names of what is imported under another one
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in node.names:
                full = f"{module}.{name.name}" if module else name.name
                whole[name.asname or name.name] = full
                yield from (f"import {module}", f"import {name.name}", f"import {full}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (f"class of {dotted(base).rpartition('.')[2]}" for base in node.bases)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node)
            first, dot, rest = name.partition(".")
            yield from (name, f"{whole.get(first, first)}{dot}{rest}")
            if isinstance(node, ast.Attribute):
                yield f".{node.attr}"
        elif isinstance(node, ast.Call):
            yield f"{dotted(node.func)}()"
            said = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if said.get("weights_only", False) is False:
                yield f"{dotted(node.func)} without weights_only"
            if dotted(node.func) in ("__import__", "importlib.import_module") and isinstance(
                node.args[0], ast.Constant
            ):
                yield f"import {node.args[0].value}"


def dotted(node: ast.AST) -> str:
    """Return the name of what is called, such as `json.loads`; "?" stands for what has none."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


CLIENTS = ["http.client", "urllib.request", "urllib3", "requests", "aiohttp", "httpx", "httpx2", "openai", "socket"]
CLIENTS += ["h11"]
JSON = ("json.loads", "json.load", ".model_validate_json")
PLAIN = (".read_text", ".read_bytes")
PICKLES = (
    "pickle.load",
    "pickle.loads",
    "torch.load without weights_only",
    "numpy.load",
    "marshal.load",
    "marshal.loads",
)
PICKLES += ("import cloudpickle", "import joblib", "import dill", "pandas.read_pickle", "eval()", "exec()")
TABLES = ("pyarrow.ipc.open_file", "pyarrow.ipc.open_stream", "pyarrow.parquet.ParquetFile", ".read_table")
PROGRAMS = ("AutoTokenizer.from_pretrained", ".apply_chat_template", ".parse_response", "render_jinja_template")

# What would go round a door, and the files that may: the door, and those that read what Outrider itself wrote, or
# what the system says.
DOORS: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "bytes from a server": (
        [f"import {name}" for name in CLIENTS],
        {
            "common/http_client.py": "the door",
            "distill/client.py": "openai, through the door's transport",
            "common/server_process.py": "looks for a free port",
            "lab/pass_through.py": "passes on what it does not read; what is kept of it is read within limits",
        },
    ),
    "JSON from a stranger": (
        JSON,
        {
            "common/untrusted_files.py": "the door",
            "common/digests.py": "what was just written as JSON",
            "common/locks.py": "of a process on this machine",
            "common/file_process_group.py": "of a process of the launch",
            "distill/engine_connector.py": "runs in an engine, on the checkpoint that this one has loaded",
            "distill/features.py": "of a process of the launch",
            "distill/responses.py": "of a process of the launch",
            "distill/journal.py": "a run's own lines, compared with their digests",
            "distill/prompt_table.py": "a file that has no name",
            "eval/reports/report.py": "what was just written as JSON",
            "formats/draft_models.py": "of a tokenizer that was loaded",
            "lab/transplant.py": "of a tokenizer that was loaded",
            "heads/mtp_checkpoint.py": "of a config that was loaded",
            "pair/comparison.py": "a tokenizer's text, read within limits; its vocabulary alone is used",
            "scripts/quickstart.py": "what ships with Outrider",
            "lab/vocabulary_study.py": "what was just written as JSON",
            "serving/launching.py": "words of the command line",
            "targets/fingerprint.py": "of a tokenizer that was loaded",
            "targets/gguf_models.py": "of a config and a tokenizer that were loaded",
        },
    ),
    "files from a stranger": (
        PLAIN,
        {
            "common/atomic.py": "of the system",
            "common/lazy.py": "source code",
            "common/locks.py": "of a process on this machine",
            "common/machine.py": "of the system",
            "common/file_process_group.py": "of a process of the launch",
            "pair/refresh.py": "a run's own file",
            "scripts/quickstart.py": "what ships with Outrider",
            "scripts/starter.py": "what ships with Outrider",
            "distill/engine_connector.py": "runs in an engine, on the checkpoint that this one has loaded",
            "train/processes.py": "of the system",
        },
    ),
    "models of what a stranger wrote": (
        ["class of BaseModel"],
        {
            "common/values.py": "the door",
            "recipes/schema.py": "a YAML file has 20,000 values at most",
            "lab/replay.py": "what Outrider found",
            "serving/diagnosis.py": "what Outrider found",
            "serving/engine_vs_decoder.py": "what Outrider found",
            "lab/watching.py": "what Outrider found",
        },
    ),
    "tables from a stranger": (
        TABLES,
        {"distill/tables.py": "the door"},
    ),
    "pickles": (PICKLES, {}),
    "a stranger's programs": (
        PROGRAMS,
        {
            "targets/tokenizers.py": "the door",
            "distill/conversation.py": "response templates",
            "lab/rl.py": "a policy's own, which its trainer has loaded",
            "targets/gguf_models.py": "tokens and merges, without patterns; what is kept of them goes through the door",
        },
    ),
    "pages": (
        ("jinja2.Environment", "jinja2.Template"),
        {"eval/reports/render.py": "the door", "scripts/starter.py": "YAML, which is parsed again"},
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_nothing_goes_round_a_door(door: str) -> None:
    """What is read elsewhere has other limits, or none; a reason that no file needs any more is taken out.

    (The Hub and wandb are talked to by their own libraries; text on its way out: tests/common/test_terminal.py.)
    """
    names, may = DOORS[door]
    assert {file for file, all_of_it in shipped().items() if not all_of_it.isdisjoint(names)} == set(may)


def test_pages_escape_what_is_put_into_them() -> None:
    source = (HOUSE / "eval/reports/render.py").read_text(encoding="utf-8")
    assert source.count("Environment(") == source.count("Environment(autoescape=True") == 1
    for page in [*(HOUSE / "eval/reports").glob("*.jinja"), *(HOUSE / "lab").glob("*.jinja")]:
        text = page.read_text(encoding="utf-8")
        assert text.count("|safe") == text.count("| safe") == text.count("autoescape") == 0


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from urllib import request", "import urllib.request"),
        ("import httpx", "import httpx"),
        ("class Answer(BaseModel): pass", "class of BaseModel"),
        ("x = json.loads(answer.text)", "json.loads"),
        ("text = Path(file).read_text()", ".read_text"),
        ("torch.load(file)", "torch.load without weights_only"),
        ("torch.load(file, weights_only=False)", "torch.load without weights_only"),
        ("from json import loads as read\nread(text)", "json.loads"),
        ("import json as j\nread = j.loads", "json.loads"),
        ("import pyarrow.parquet as pq\npq.ParquetFile(file)", "pyarrow.parquet.ParquetFile"),
        ("__import__('httpx')", "import httpx"),
        ("class Answer(pydantic.BaseModel): pass", "class of BaseModel"),
        ("tokenizer.apply_chat_template(chat)", ".apply_chat_template"),
    ],
)
def test_the_look_finds_what_goes_round(source: str, name: str) -> None:
    assert name in set(used(source))
