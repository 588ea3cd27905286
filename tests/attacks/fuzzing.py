"""Damaged and hostile files, one at a time, from a seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from world import Attempt, reseal

SHORT = ["--max-new-tokens", "4", "--no-compare"]
GENERATE, GENERATE_DRAFT, GENERATE_MEDUSA, GENERATE_MTP = (
    ["generate", f"pair-{name}", "def", *SHORT] for name in ("eagle", "draft", "medusa", "mtp")
)
CHAT = ["generate", "pair-eagle", "def", "--chat", *SHORT]
VERIFY = ["pair", "verify", "pair-eagle"]
SHOW = ["pair", "show", "pair-eagle"]
PROBE = ["probe", "pair-eagle", "--target", "target"]
ADAPTED = ["probe", "pair-eagle", "--target", "target", "--adapter", "adapter"]
DISTILL = ["distill", "eagle.yaml", "output=new"]
PLAN = ["plan", "eagle.yaml"]
EVAL = ["eval", "pair-eagle", "--limit", "1"]
GATE = ["gate", "report", "--against", "report"]
NEW = ["pair", "new", "p", "eagle.yaml", "--report", "report"]
TRAIN = ["train", "eagle.yaml", "output=new", "data.responses=run-eagle/data"]
AGAIN = ["train", "eagle.yaml", "training.max_steps=3"]

# Each file with the commands that read it, and how often it is drawn.
FILES: dict[str, tuple[int, list[list[str]]]] = {
    "pair-eagle/pair.json": (12, [VERIFY, SHOW, GENERATE, EVAL, PROBE]),
    "pair-eagle/drafter/config.json": (10, [GENERATE, VERIFY]),
    "pair-medusa/drafter/config.json": (5, [GENERATE_MEDUSA]),
    "pair-mtp/drafter/config.json": (7, [GENERATE_MTP]),
    "pair-draft/drafter/config.json": (7, [GENERATE_DRAFT]),
    "pair-draft/drafter/generation_config.json": (2, [GENERATE_DRAFT]),
    "pair-eagle/tokenizer/tokenizer_config.json": (4, [GENERATE, PROBE]),
    "pair-eagle/tokenizer/tokenizer.json": (4, [GENERATE, PROBE]),
    "pair-eagle/calibration.jsonl": (4, [PROBE]),
    "pair-eagle/recipe.yaml": (5, [EVAL]),
    "target/config.json": (10, [GENERATE, DISTILL, PLAN]),
    "target/generation_config.json": (3, [GENERATE, DISTILL]),
    "target/tokenizer_config.json": (4, [GENERATE, CHAT]),
    "target/tokenizer.json": (4, [GENERATE]),
    "target/chat_template.jinja": (3, [CHAT]),
    "adapter/adapter_config.json": (7, [ADAPTED]),
    "eagle.yaml": (12, [PLAN, DISTILL]),
    "accelerate.yaml": (3, [[*PLAN, "--accelerate-config", "accelerate.yaml"]]),
    "prompts.jsonl": (4, [DISTILL]),
    "report/report.json": (6, [GATE, NEW]),
    "run-eagle/data/provenance.json": (3, [TRAIN]),
    "run-eagle/checkpoints/*/trainer_state.json": (2, [AGAIN]),
}
WEIGHTS: dict[str, list[list[str]]] = {
    "pair-eagle/drafter/model.safetensors": [GENERATE],
    "pair-medusa/drafter/model.safetensors": [GENERATE_MEDUSA],
    "pair-draft/drafter/model.safetensors": [GENERATE_DRAFT],
    "target/model.safetensors": [GENERATE],
    "adapter/adapter_model.safetensors": [ADAPTED],
}


def damaged(count: int, seed: int) -> Iterator[Attempt]:
    """Yield `count` attempts of one damaged file and one command; the same ones for the same seed."""
    files, weights = list(FILES), [FILES[name][0] for name in FILES]
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        if number % 8 == 7:
            file = draw.choice(list(WEIGHTS))
            kind, change = draw.choice(list(HEADERS.items()))
            command = draw.choice(WEIGHTS[file])
        else:
            file = draw.choices(files, weights)[0]
            command = draw.choice(FILES[file][1])
            kind, change = draw.choice(list((TEXTS | (VALUES if not file.endswith(".jinja") else JINJA)).items()))
            if kind in VALUES:
                change = _of_values(file, change)
        plant = partial(_plant, file, change, f"{seed}/{number}", draw.random() < 0.5)
        yield Attempt(f"{number}: {kind} in {file}", plant, [command], file)


def _plant(file: str, change: Callable[..., bytes], seed: str, resealed: bool, world: Path) -> None:
    for place in list(world.glob(file)):
        place.write_bytes(change(place.read_bytes(), random.Random(seed)))
    if resealed and file == "report/report.json":  # a report of before checksums
        with suppress(ValueError, RecursionError, AttributeError):
            values = json.loads((world / file).read_bytes())
            (world / file).write_text(json.dumps({k: v for k, v in values.items() if k != "checksum"}))
    if resealed and file.startswith("pair-"):
        with suppress(ValueError, KeyError, TypeError, RecursionError, AttributeError):  # nothing is left to seal
            reseal(world / file.partition("/")[0])


def _flip(text: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(max(1, len(text)))
    return text[:place] + bytes([text[place] ^ 1 << draw.randrange(8)]) + text[place + 1 :]


def _spliced(text: bytes, draw: random.Random, piece: bytes) -> bytes:
    place = draw.randrange(len(text) + 1)
    return text[:place] + piece + text[place:]


TEXTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a flipped bit": _flip,
    "an end cut off": lambda text, draw: text[: draw.randrange(len(text) + 1)],
    "nothing": lambda text, draw: b"",
    "bytes": lambda text, draw: draw.randbytes(draw.randrange(2000)),
    "a zero byte": lambda text, draw: _spliced(text, draw, b"\0"),
    "UTF-16": lambda text, draw: text.decode("utf-8", "replace").encode("utf-16"),
    "a byte order mark": lambda text, draw: b"\xef\xbb\xbf" + text,
    "Latin-1": lambda text, draw: _spliced(text, draw, b"\xe4\xf6\xff"),
    "many brackets": lambda text, draw: draw.choice([b"[", b'{"a":', b"[{"]) * draw.choice([50, 2000, 100_000]),
    "closed brackets": lambda text, draw: b"[" * (n := draw.choice([50, 300, 20_000])) + b"]" * n,
    "ten megabytes": lambda text, draw: b'{"a": "' + b"x" * 10_000_000 + b'"}',
    "a million lists": lambda text, draw: b"[" + b"[]," * 1_200_000 + b"[]]",
    "another value": lambda text, draw: draw.choice([b"null", b"true", b"3", b'"text"', b"[]", b"{}", b"NaN", b"- 1"]),
    "a YAML bomb": lambda text, draw: _bomb(draw),
    "itself twice": lambda text, draw: text + text,
}


def _bomb(draw: random.Random) -> bytes:
    kind, lines = draw.choice(["[{}]", "{{x: {}, y: {}}}", "<<"]), ["a0: &a0 [x, x]"]
    for level in range(1, draw.choice([8, 20, 200])):
        inside = f"*a{level - 1}"
        if kind == "<<":
            lines[0] = "a0: &a0 {x: 1}"
            lines.append(f"a{level}: &a{level} {{<<: [{inside}, {inside}, {inside}]}}")
        else:
            lines.append(f"a{level}: &a{level} " + kind.format(", ".join([inside] * 9), inside))
    return ("\n".join(lines) + "\n").encode()


JINJA: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a template's edge": lambda text, draw: draw.choice(
        [
            b"{{ (" + b"(" * 5000 + b"1" + b")" * 5000 + b") }}",
            b"{% if 1 %}" * 500 + b"{% endif %}" * 500,
            b"{{ messages[0]['content'][0] }}" * 50_000,
            b"{{ x.y.z }}",
            b"{% for",
        ]
    ),
}


NASTY: list[Any] = [None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 10**9, 10**12, 10**30]
NASTY += ["DIGITS", "MANY DIGITS", 1e308, -1e-300, "NAN", "INFINITY", "", "x", "\x00", "\u2028", "SURROGATE"]
NASTY += ["x" * 100_000, "../../../../etc/passwd", "/dev/zero", "(a+)+$", "{{ 7 * 7 }}"]
NASTY += [[], {}, [[[[[]]]]], [None], ["x"] * 1000, {"a": {"b": {"c": {}}}}, {"": None}, "DEEP"]


def _of_values(file: str, change: Callable[..., Any]) -> Callable[[bytes, random.Random], bytes]:
    """Return a change of the text of a file, from one of its values."""

    def changed(text: bytes, draw: random.Random) -> bytes:
        if file.endswith(".jsonl"):
            lines = text.decode().splitlines()
            place = draw.randrange(len(lines))
            lines[place] = _written(change(json.loads(lines[place]), draw))
            return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        values = yaml.safe_load(text) if file.endswith(".yaml") else json.loads(text)
        return _written(change(values, draw)).encode("utf-8", "surrogatepass")

    return changed


def _written(values: Any) -> str:
    """Return JSON (which is YAML, too), with what Python's own writer cannot say in place of its names."""
    text = json.dumps(values, indent=2)
    names = {"MANY DIGITS": "9" * 5000, "DIGITS": "9" * 200, "NAN": "NaN", "INFINITY": "-Infinity"}
    names |= {"SURROGATE": '"\\ud800"', "DEEP": "[" * 5000 + "]" * 5000}
    for name, said in names.items():
        text = text.replace(f'"{name}"', said)
    return text


def _places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value but the whole."""
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place for key, value in inside for place in [(*path, key), *_places(value, (*path, key))]]


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _chosen(values: Any, draw: random.Random) -> tuple[Any, Any]:
    """Return the holder and the key of a value; those near the top are drawn as often as all others together."""
    places = _places(values)
    shallow = [place for place in places if len(place) <= 2]
    place = draw.choice(shallow if draw.random() < 0.5 else places)
    return _at(values, place[:-1]), place[-1]


def _replaced(values: Any, draw: random.Random) -> Any:
    if not _places(values):
        return draw.choice(NASTY)
    holder, key = _chosen(values, draw)
    holder[key] = draw.choice(NASTY)
    return values


def _bigger(values: Any, draw: random.Random) -> Any:
    numbers = [p for p in _places(values) if isinstance(_at(values, p), int | float)]
    if numbers:
        place = draw.choice(numbers)
        _at(values, place[:-1])[place[-1]] = draw.choice([2**31, 10**9, 10**7, 10**12, -1, 0, 3.7, 1e300, "DIGITS"])
    return values


def _without(values: Any, draw: random.Random) -> Any:
    if _places(values):
        holder, key = _chosen(values, draw)
        del holder[key]
    return values


def _more(values: Any, draw: random.Random) -> Any:
    if isinstance(values, dict):
        names = ["nmae", "__class__", "", "tokens", "auto_map", "quantization_config", "layer_types", "SURROGATE"]
        values[draw.choice(names)] = draw.choice(NASTY)
    return values


def _wrapped(values: Any, draw: random.Random) -> Any:
    return draw.choice([[values], {"a": values}, [values, values], str(values)[:1000]])


def _several(values: Any, draw: random.Random) -> Any:
    for _ in range(draw.randrange(2, 6)):
        values = draw.choice([_replaced, _bigger, _without])(values, draw)
    return values


VALUES: dict[str, Callable[[Any, random.Random], Any]] = {
    "a nasty value": _replaced,
    "another nasty value": _replaced,
    "one more nasty value": _replaced,
    "a huge number": _bigger,
    "another huge number": _bigger,
    "a value left out": _without,
    "a value too many": _more,
    "a value wrapped": _wrapped,
    "several changes": _several,
}


def _header(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else _written(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _entries(change: Callable[[dict[str, Any], random.Random], None]) -> Callable[[bytes, random.Random], bytes]:
    """Return a change of one tensor's entry, or of all entries."""

    def changed(content: bytes, draw: random.Random) -> bytes:
        header, body = _header(content)
        names = [name for name in header if name != "__metadata__"]
        for name in names if draw.random() < 0.3 else [draw.choice(names)]:
            change(header[name], draw)
        return _joined(header, body)

    return changed


def _relabelled(entry: dict[str, Any], draw: random.Random) -> None:
    same = {"F32": ["I32", "U32"], "BF16": ["F16", "I16", "U16"], "I64": ["F64", "U64"]}
    entry["dtype"] = draw.choice([*same.get(entry["dtype"], []), "I8", "F64", "BOOL", "F8_E4M3", "X", None, 3])


def _reshaped(entry: dict[str, Any], draw: random.Random) -> None:
    shape = entry["shape"]
    entry["shape"] = draw.choice([shape[::-1], [*shape, 1], [], [0], [2**40, 2**40], [-1], ["x"], [10**9], None])


def _moved(entry: dict[str, Any], draw: random.Random) -> None:
    begin, end = entry["data_offsets"]
    others = [[end, begin], [begin + 1, end + 1], [0, 2**63], [-1, 3], [0, 0], ["0", "1"], []]
    entry["data_offsets"] = draw.choice(others)


def _renamed(content: bytes, draw: random.Random) -> bytes:
    header, body = _header(content)
    name = draw.choice([n for n in header if n != "__metadata__"])
    header[draw.choice(["x", "", "../x", "SURROGATE", name + ".x"])] = header.pop(name)
    return _joined(header, body)


def _many(content: bytes, draw: random.Random) -> bytes:
    header, body = _header(content)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return _joined(header | {f"x{i}": empty for i in range(draw.choice([10, 100_000]))}, body)


HEADERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a type relabelled": _entries(_relabelled),
    "another type": _entries(_relabelled),
    "another shape": _entries(_reshaped),
    "other offsets": _entries(_moved),
    "another name": _renamed,
    "many tensors": _many,
    "a header's length": lambda content, draw: (
        struct.pack("<Q", draw.choice([0, 1, 2**20, 2**31, 2**63, 2**64 - 1])) + content[8:]
    ),
    "no header": lambda content, draw: _joined(draw.choice([b"", b"[]", b"null", b"{", b"[" * 100_000]), b""),
    "a body cut off": lambda content, draw: content[: draw.randrange(len(content))],
    "a flipped bit": _flip,
    "a body doubled": lambda content, draw: content + content[-100:],
}
