"""The map: every file of the package in one line, which is the first sentence of its docstring.

python docs/developers/map.py            # writes docs/developers/map.md
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_suffix(".md")
# In the order in which imports point.
ROOMS = ("common", "targets", "heads", "formats", "decode", "recipes", "distill", "costs", "eval", "train", "pair")
ROOMS += ("serving", "scripts", "lab")
OPENING = """# The map

Which file do I open? Every file of the package in one line, the first sentence of its docstring. [The house](house.md)
says what the rooms are and in which order to read; `python docs/developers/map.py` makes this page.
"""


def first_sentence(file: Path) -> str:
    """Return the first sentence of a file's docstring, on one line and without its full stop; "" without docstring."""
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(said.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", paragraph)[0].rstrip(":.")


def lines(room: str) -> Iterator[str]:
    """Yield an entry for each file of a room that says what it is, in lines that fit a window."""
    for file in sorted((ROOT / room).rglob("*.py")):
        if file.name != "__init__.py" and (sentence := first_sentence(file)):
            entry = f"- `{file.relative_to(ROOT).as_posix()}`: {sentence}"
            yield textwrap.fill(entry, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def page() -> str:
    """Return the whole page."""
    sections = ["\n".join([f"## {room}", "", *lines(room)]) for room in ROOMS]
    return "\n\n".join([OPENING.strip(), *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
