"""The site: built strictly, nothing asked of other servers, each page as Markdown beside its HTML.

What needs a browser is skipped without one: `pip install playwright axe-playwright-python` and Debian's `chromium`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from outrider.common.runtime import installed_version

from ..scripts.conftest import all_verbs, verb_of

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/-]+\.md)$", nav, flags=re.MULTILINE))
    pages = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set()


def test_troubleshooting_has_every_class_of_error_with_its_exit_code() -> None:
    page = subprocess.check_output([sys.executable, ROOT / "docs/site/troubleshooting.py"], text=True)
    assert re.search(r"unknown key ….*\(exit code 2\)", page)
    assert {f"(exit code {code})" for code in (2, 3)} <= set(re.findall(r"\(exit code \d\)", page))
    assert len(page.splitlines()) > 500
    for heading in ("vLLM", "SGLang", "llama.cpp", "accelerate and torch", "DeepSpeed"):
        assert f"## {heading}\n" in page


class Links(HTMLParser):
    """Everything that a page refers to, what a browser loads by itself, and the places inside it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links = set[str]()
        self.loaded = set[str]()
        self.places = set[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}
        loads = tag in ("script", "img", "iframe", "source") or (tag == "link" and found.get("rel") != "canonical")
        self.loaded |= {found[name] for name in ("href", "src") if loads and found.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(map(installed_version, ("mkdocs-material", "mkdocstrings-python"))):
        pytest.skip("needs the extra `docs`")
    place = tmp_path_factory.mktemp("site") / "outrider"  # where site_url has it
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", place], cwd=ROOT, check=True)
    return place


def pages_of(site: Path) -> Iterator[tuple[Path, Links]]:
    return ((file, Links(file.read_text(encoding="utf-8"))) for file in site.rglob("*.html"))


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere_and_load_nothing_from_elsewhere(site: Path) -> None:
    pages = dict(pages_of(site))
    assert len(pages) > 35
    for file, page in pages.items():
        assert [link for link in page.loaded if link.startswith(("http", "//"))] == [], file.name
        for link in page.links - page.loaded:
            path, place = urldefrag(unquote(link))
            if file.name == "404.html" or re.match(r"\w+:", link):
                continue
            there = (file.parent / path).resolve() if path else file
            assert there.exists(), (file.name, link)
            assert not place or there not in pages or place in pages[there].places, (file.name, link)
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", styles) == []


@pytest.mark.slow
def test_each_page_says_what_it_takes_and_lies_there_as_markdown(site: Path) -> None:
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    for file in site.rglob("*.html"):
        if file.name in ("404.html", "index.html"):
            continue
        text = file.with_suffix(".md").read_text(encoding="utf-8")
        assert " · checked with " in text, file.name
        assert f"/{file.with_suffix('.md').relative_to(site).as_posix()})" in listed, file.name
    assert "?" in listed


@pytest.mark.slow
def test_the_search_finds_keys_names_and_errors(site: Path) -> None:
    """One question of a new user each, by the words that he would type."""
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    asked = {
        "learning_rate": "your-own-target",
        "max_prompt_tokens": "recipe-keys",
        "Target.load": "python",
        "hot_token_id": "troubleshooting",
    }
    asked |= {"Push a drafter to the Hub": "registry", "How many answers do I need": "what-training-brings"}
    asked |= {"llama.cpp": "serving", "stale": "pairs-in-ci", "registry": "registry", "vocabulary": "formats"}
    for word, page in asked.items():
        assert any(word in entry["text"] + entry["title"] and page in entry["location"] for entry in index), word


# What a new user types, and the page that answers it: a click away.
QUESTIONS = {
    "install": "start.html",
    "which method": "guides/choosing-a-method.html",
    "how many answers": "guides/what-training-brings.html",
    "out of memory": "troubleshooting.html",
    "several GPUs": "guides/many-processes.html",
    "resume training": "guides/your-own-target.html",
    "serve with vllm": "guides/serving.html",
    "lossless": "concepts/losslessness.html",
    "target was fine-tuned": "guides/pairs-in-ci.html",
    "what is tau": "concepts/words.html",
    "push to hub": "guides/registry.html",
    "exit code": "guides/pairs-in-ci.html",
}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=site.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/outrider/"
    server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_the_browser_asks_no_other_server(
    site: Path, address: str, browser: Any, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = browser.new_page(color_scheme=scheme, reduced_motion="reduce")
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    found = {}
    for file in sorted(site.rglob("*.html")):
        page.goto(address + file.relative_to(site).as_posix())
        found[file.name] = [fault["id"] for fault in axe.run(page).response["violations"]]
    assert {name: faults for name, faults in found.items() if faults} == {}
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.slow
def test_a_new_users_questions_are_answered_by_one_of_the_first_three_pages(address: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(address + "start.html")
    box, links = page.locator("input.md-search__input"), ".md-search-result__item > a"
    box.click()
    missed = {}
    for question, answer in QUESTIONS.items():
        box.fill("")
        page.keyboard.press("Space")
        page.wait_for_function(f"!document.querySelector('{links}')")
        box.press_sequentially(question)
        page.wait_for_timeout(3000)  # results follow the words while they are typed
        found = page.eval_on_selector_all(links, "all => all.map(one => one.href.split(/[?#]/)[0])")
        shown = list(dict.fromkeys(link.removeprefix(address) for link in found))[:3]
        if answer not in shown:
            missed[question] = shown
    assert missed == {}


def test_the_assistants_page_names_the_verbs_without_json() -> None:
    silent = {
        verb
        for verb in all_verbs()
        if not any("--json" in option.opts for option in verb_of(["outrider", *verb.split()])[0].params)
    }
    text = " ".join((ROOT / "docs/for-assistants.md").read_text(encoding="utf-8").split())
    sentence = text.partition("Without it are ")[2].partition(". - **")[0]
    assert set(re.findall(r"`([^`]+)`", sentence)) == silent
