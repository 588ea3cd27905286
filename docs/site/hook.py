"""What the site adds to the pages: pages from outside docs/, facts below each title, Markdown beside HTML, llms.txt."""

from __future__ import annotations

import ast
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import troubleshooting  # beside this file, which is no package

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE = PROJECT["project"]["urls"]["Source"] + "/blob/main/"
# Pages of the checkout that lie outside docs/, and where the site has them.
OUTSIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "support.md",
    "benchmarks/RESULTS.md": "results.md",
}
# The packages whose public names are the reference, and what a reader looks for there.
PUBLIC = {
    "targets": "The target: `Target.load` and what a pass returns",
    "heads": "Drafters, their contract and their sessions",
    "decode": "The decoder, its plans and what it returns",
    "recipes": "Recipes and their schema",
    "distill": "The target's responses",
    "train": "Training",
    "eval": "Reports, figures and their intervals",
    "formats": "Layouts of engines",
    "pair": "Pairs: made, verified, probed, exported",
}
WORDS_A_MINUTE = 200
# Pages that answer questions come before those that list names.
BOOSTS = {
    "start": 4,
    "for-assistants": 4,
    "guides/": 4,
    "concepts/": 4,
    "troubleshooting": 2,
    "developers/": 0.3,
    "reference/python": 0.3,
}
SEARCH = 'data-md-component="search" role="dialog"'
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


# ------------------------------------------------------------ pages that are made here


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, the Python reference and troubleshooting."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/python.md", content=python_reference()))
    files.append(File.generated(config, "troubleshooting.md", content=troubleshooting.page()))
    return files


def on_startup(**_: Any) -> None:
    """Show mkdocstrings the rooms of the checkout, and nothing else there, under the name they are imported by."""
    folder = ROOT / "build" / "api" / "outrider"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        room = name.split(".")[1]
        if not (folder / room).is_symlink():
            (folder / room).symlink_to(ROOT / room)


def python_reference() -> str:
    """Return the page of all public names, each where its docstring stands."""
    parts = [
        "# From Python\n\nWhich classes and functions may a program of mine use? Those below; other names may change."
    ]
    for room, title in PUBLIC.items():
        names = "\n\n".join(f"::: outrider.{room}.{name}" for name in public_names(room))
        parts.append(f"## `outrider.{room}` {{ #{room} }}\n\n{title}.\n\n{names}")
    return "\n\n".join(parts) + "\n"


def public_names(room: str) -> Iterator[str]:
    """Yield what a package exports, with the module that holds it: `engine.Decoder`."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    homes = {one.name: f"{node.module}.{one.name}" for node in imported for one in node.names}
    listed = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign) and "__all__" in ast.unparse(node)
    ]
    for name in sorted(name for value in listed for name in ast.literal_eval(value)):
        if not name.isupper():  # a table of classes that have entries of their own
            yield homes.get(name, name)


# ------------------------------------------------------------ what every page gets


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make links that leave docs/ lead into the site or the repository, and say below the title what a page takes."""
    source = next((path for path, place in OUTSIDE.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")
    text = LINK.sub(lambda found: site_link(found[1], source, page.file.src_uri, files), markdown)
    line = facts(page.file.src_uri, text, config.extra["work"])
    place = page.file.src_uri
    page.meta["search"] = {"boost": next((times for part, times in BOOSTS.items() if place.startswith(part)), 1)}
    return re.sub(r"\A(.*?^# .+?\n)", rf"\1\n{line}\n", text, count=1, flags=re.MULTILINE | re.DOTALL)


def site_link(link: str, source: str, place: str, files: Files) -> str:
    """Return a link of the page `source` of the checkout as it is right on the page `place` of the site."""
    if ":" in link:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    inside = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if inside is None or files.get_file_from_path(inside) is None:
        return SOURCE + path
    return posixpath.relpath(inside, posixpath.dirname(place))


def facts(place: str, text: str, work: dict[str, str]) -> str:
    """Return the line below a title: how long a page takes, and which versions its commands were checked with."""
    minutes = max(1, round(len(text.split()) / WORDS_A_MINUTE))
    reading = "to look things up" if minutes > 20 or "\n::: " in text else f"{minutes} min to read"
    return " · ".join(filter(None, [reading, work.get(place), f"checked with {versions()}"])) + "\n{ .facts }\n"


def versions() -> str:
    """Return the versions that the tests run with: they execute the pages' examples and parse every command."""
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = dict(pins)
    libraries = ", ".join(f"{name} {pinned[name]}" for name in ("torch", "transformers"))
    return f"Outrider {PROJECT['project']['version']}, {libraries}"


# ------------------------------------------------------------ for programs that read


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Write a page's Markdown beside its HTML; add what the theme leaves out for screen readers and keyboards."""
    file = Path(config.site_dir) / page.file.src_uri
    file.parent.mkdir(parents=True, exist_ok=True)
    names = r"- `\1`"
    file.write_text(re.sub(r"^::: (\S+)$", names, page.markdown or "", flags=re.MULTILINE), encoding="utf-8")
    return with_named_search(output.replace("<th></th>", "<td></td>"))  # above the names of rows


def on_post_template(output: str, **_: Any) -> str:
    """Return the page of error 404, which is no page of ours, with a name for its search, too."""
    return with_named_search(output)


def with_named_search(html: str) -> str:
    return html.replace(SEARCH, f'{SEARCH} aria-label="Search the pages"')


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    """Keep the sections for llms.txt."""
    config.extra["sections"] = [(section.title, section.children) for section in nav.items]


def on_post_build(config: Any) -> None:
    """Write llms.txt: every page of the site by section, with the question that it answers."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, pages in config.extra["sections"]:
        lines += [f"## {title}", ""]
        lines += [f"- [{page.title}]({config.site_url}{page.file.src_uri}): {question(page)}" for page in pages]
        lines.append("")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def question(page: Page) -> str:
    """Return the first sentence of a page."""
    body = re.sub(r"^.*?\{ \.facts \}", "", page.markdown or "", flags=re.DOTALL).strip()
    paragraph = " ".join(body.split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph))[0]
