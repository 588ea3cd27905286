"""The page of errors, keyed by their text: engines' from engine_errors.yaml, ours read from the code.

python docs/site/troubleshooting.py      # prints the page
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
# Which page tells more about the errors of a room.
PAGES = {
    "targets": "guides/your-own-target.md",
    "heads": "guides/choosing-a-method.md",
    "formats": "guides/formats.md",
    "decode": "guides/serving.md",
    "recipes": "reference/recipe-keys.md",
    "distill": "guides/data.md",
    "eval": "concepts/measuring.md",
    "train": "guides/many-processes.md",
    "pair": "guides/pairs-in-ci.md",
    "serving": "guides/served.md",
    "lab": "lab.md",
    "scripts": "guides/pairs-in-ci.md",
    "common": "security.md",
    "costs": "guides/your-own-target.md",
}
EXITS = {"BadInputError": 2, "Refusal": 2, "NotFiniteError": 2, "RowError": 2, "IncompatibleError": 3, "StaleError": 1}
OPENING = """# Troubleshooting

Which error did I get, and what do I do? Search for the words of the message that are no names or numbers. First what
engines and launchers say where users of drafters meet it, then every sentence of Outrider's own, as the code has it
(“…” stands for names and numbers). What is not here is a fault of ours, exit code 70: please
[report it](https://github.com/outrider-project/outrider/issues).
"""


def page() -> str:
    """Return the whole page as Markdown."""
    engines = yaml.safe_load((Path(__file__).parent / "engine_errors.yaml").read_text(encoding="utf-8"))
    parts = [OPENING.strip()]
    for engine, errors in engines.items():
        entries = (f"### `{error['says']}`\n\n{error['why']}\n\n{error['do']}" for error in errors)
        parts.append(f"## {engine}\n\n" + "\n\n".join(entries))
    for room, more in PAGES.items():
        if rows := sorted(set(sentences(room))):
            entries = "\n".join(f"- {text} <small>(exit code {code})</small>" for text, code in rows)
            parts.append(f"## Outrider: `{room}/`\n\nMore: [{more}]({more})\n\n{entries}")
    return "\n\n".join(parts) + "\n"


def sentences(room: str) -> Iterator[tuple[str, int]]:
    """Yield what the errors say that a room raises, with the exit code that each ends a command with."""
    for file in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (code := EXITS.get(name_of(node.func))) and node.args:
                text = " ".join("; ".join(filter(None, map(template, node.args))).split())
                if len(re.findall(r"[a-z]{2,}", text)) >= 2:
                    yield escaped(text), code


def name_of(function: ast.expr) -> str:
    """Return the class that is called: of `Refusal.of(…)`, too."""
    if isinstance(function, ast.Attribute):
        return name_of(function.value)
    return function.id if isinstance(function, ast.Name) else ""


def template(message: ast.expr) -> str:
    """Return a message with “…” for everything that is known only when it is raised."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return re.sub(
            r"(…\s*)+", lambda run: "… " if run[0].endswith(" ") else "…", "".join(map(template, message.values))
        )
    if isinstance(message, ast.BinOp):
        return template(message.left) + template(message.right)
    return "…"


def escaped(text: str) -> str:
    """Return a sentence as Markdown shows it literally."""
    return re.sub(r"([\\*_\[\]<>#|~])", r"\\\1", text)


if __name__ == "__main__":
    print(page(), end="")
