"""Text that a terminal, a page or a report would obey, in every place from which a verb takes text.

Each attempt writes one such text into one value of a file that somebody else may have written, or into a name. It must
come out as text: no control character in what the verb prints, no tag or link of it in what the verb writes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml
from fuzzing import FILES, VERIFY, _at, _places
from world import Attempt, reseal

SECRET = "s3cr3t-t0ken"
TEXTS = {
    "a colour": "a\x1b[31mred",
    "a title": "a\x1b]0;owned\x07",
    "a link of the terminal": "a\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "the clipboard": "a\x1b]52;c;ZXZpbA==\x07",
    "a cleared screen": "a\x1b[2J\x1b[H",
    "a C1 sequence": "a\x9b31m\x9d0;owned\x9c",
    "a C1 string": "a\x90q\x9c\x85b",
    "a line written over": "a\rerror: none\b\b\x7f",
    "letters turned round": "a\u202egpj.exe\u2066b\u200f",
    "half of a surrogate": "a\ud800",
    "markup that ends": "a[/bold][/red][/]",
    "markup that begins": "a[red][link=http://evil]b",
    "markup with an escape": "a\\[bold]b\\",
    "a picture": "a:bomb::pile_of_poo:",
    "HTML": "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "HTML out of an attribute": "\" onmouseover=\"alert(1)' x='<b>",
    "XML that ends": "]]></failure></testsuite><evil/>",
    "Markdown": "](http://evil) ![x](http://evil) <b>\n\n# heading\n```\n| a | b |",
    "a cell that ends": "a\\| b \\\\| c | d",
    "a template": "{{ 7 * 7 }}{% for x in y %}",
    "a format": "{0.__class__} %s %(x)s {",
}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
GATE = ["gate", "report", "--against", "report", "--junit", "gate.xml", "--markdown", "gate.md"]
REPORT = ["eval", "pair-eagle", "eval.max_new_tokens=2", "--limit", "1", "--out", "written"]
COMMANDS: dict[str, list[list[str]]] = {name: commands for name, (_, commands) in FILES.items()} | {
    "report/report.json": [GATE, [*GATE, "--json"], ["pair", "new", "p", "eagle.yaml", "--report", "report"]],
    "pair-eagle/pair.json": [
        VERIFY,
        ["pair", "show", "pair-eagle"],
        ["pair", "push", "pair-eagle", "--registry", "registry"],
        ["pair", "diff", "pair-eagle", "pair-medusa"],
        ["export", "pair-eagle", "--to", "vllm", "--out", "exported", "--target", "target"],
        REPORT,
    ],
    "eagle.yaml": [["plan", "eagle.yaml"], ["distill", "eagle.yaml", "output=new"], ["data", "show", "eagle.yaml"]],
    "prompts.jsonl": [["data", "show", "eagle.yaml"], ["data", "check", "eagle.yaml"], REPORT],
}
# Names that a user may be given: folders, words on the command line, references.
NAMES: list[Callable[[str], list[str]]] = [
    lambda text: ["pair", "show", text],
    lambda text: ["pair", "verify", f"./{text}"],
    lambda text: ["plan", "eagle.yaml", f"output={text}"],
    lambda text: ["plan", "eagle.yaml", f"{text}=1"],
    lambda text: ["pair", "pull", text, "pulled", "--registry", "registry"],
    lambda text: ["pair", "log", "--registry", text],
    lambda text: ["lab", "watch", f"http://u:{SECRET}@127.0.0.1:9/{text}", "--once"],
    lambda text: ["served", "pair-eagle", "--url", f"http://127.0.0.1:9/?key={SECRET}&{text}"],
    lambda text: ["distill", "eagle.yaml", "output=new", f"data.servers=['http://u:{SECRET}@h/{text}']"],
    lambda text: ["train", f"{text}.yaml"],
    lambda text: ["export", "pair-eagle", "--to", text],
    lambda text: ["generate", "pair-eagle", text, "--max-new-tokens", "2", "--no-compare"],
    lambda text: ["gate", text, "--against", "report"],
]


def attempts(seed: int = 0) -> Iterator[Attempt]:
    """Yield every text in a value of every file, and in every name; the same ones for the same seed."""
    for number, (kind, text) in enumerate(TEXTS.items()):
        draw = random.Random(f"{seed}/{kind}")
        for file in draw.sample(list(COMMANDS), 4):
            commands = draw.sample(COMMANDS[file], min(2, len(COMMANDS[file])))
            yield Attempt(f"{kind} in {file}", partial(_plant, file, text, f"{seed}/{kind}/{file}"), commands, file)
        plain = text.replace("\ud800", "\udc80").replace("\x00", "")
        for name in (NAMES[(2 * number + seed) % len(NAMES)], NAMES[(2 * number + 1 + seed) % len(NAMES)]):
            yield Attempt(f"{kind} in a name", lambda world: None, [name(plain)])
        stray = Path("pair-eagle") / plain.replace("/", "-")
        yield Attempt(f"{kind} in a file's name", partial(_stray, stray), [VERIFY])


def _stray(file: Path, world: Path) -> None:
    (world / file).write_text("")


def _plant(file: str, text: str, seed: str, world: Path) -> None:
    """Write the text into one value of the file, or into the name of one, and seal what is sealed."""
    draw = random.Random(seed)
    for place in world.glob(file):
        lines = place.read_text().splitlines() if file.endswith(".jsonl") else [place.read_text()]
        which = draw.randrange(len(lines))
        values = yaml.safe_load(lines[which]) if not file.endswith(".jinja") else lines[which] + text
        lines[which] = values if isinstance(values, str) else json.dumps(_with(values, text, draw))
        place.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        if file == "report/report.json":  # a report of before checksums
            place.write_text(json.dumps({k: v for k, v in json.loads(place.read_text()).items() if k != "checksum"}))
    if file.startswith("pair-"):
        try:
            reseal(world / file.partition("/")[0])
        except ValueError:  # nothing is left to seal
            return


def _with(values: Any, text: str, draw: random.Random) -> Any:
    paths = [path for path in _places(values) if isinstance(_at(values, path), str)]
    if not paths or draw.random() < 0.1:
        return values | {text: text}
    shallow = [path for path in paths if len(path) <= 3]
    path = draw.choice(shallow or paths)
    old = _at(values, path)
    if draw.random() < 0.3:  # wherever the same text stands, such as the name of a suite
        return json.loads(json.dumps(values).replace(json.dumps(old), json.dumps(text)))
    _at(values, path[:-1])[path[-1]] = text
    return values


class _Page(HTMLParser):
    """What a browser would obey in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.obeyed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        strange = [name for name, value in attrs if name.startswith("on") or "evil" in (value or "")]
        if strange or tag in ("img", "evil", "b"):
            self.obeyed.append(f"<{tag} {' '.join(strange)}>")


def obeyed(folder: Path) -> list[str]:
    """Return what of the texts would be obeyed in what a command printed, and in the pages that it wrote."""
    lines = []
    said = (folder / ".said").read_bytes().decode("utf-8", "surrogateescape")
    if control := OBEYED.search(said):
        lines.append(f"printed {control[0]!a} in {said[max(0, control.start() - 60) : control.start() + 20]!a}")
    if SECRET in said:
        lines.append("printed a secret")
    for page in folder.glob("written/*.html"):
        parser = _Page()
        parser.feed(page.read_text(errors="replace"))
        lines += [f"{page.name}: {tag}" for tag in parser.obeyed]
    for page in [folder / "gate.md", *folder.glob("written/*.md"), *folder.glob("exported/*.md")]:
        text = page.read_text(errors="replace") if page.is_file() else ""
        for wrong in ("](http", "<img", "<script", "\n# heading", "<b>", "</test"):
            lines += [f"{page.name}: {wrong!a}"] if wrong in text else []
        lines += [f"{page.name}: a control character"] if OBEYED.search(text) else []
    if (folder / "gate.xml").is_file():
        root = ElementTree.parse(folder / "gate.xml").getroot()
        lines += ["gate.xml: <evil>"] if root.tag != "testsuites" or list(root.iter("evil")) else []
    return lines
