"""Reports: what is written, that it can be read again, and that the page stands alone."""

from __future__ import annotations

import io
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from outrider.common import BadInputError
from outrider.eval import Report, reports
from outrider.eval.reports import tables
from outrider.eval.reports.figures import Interval
from outrider.eval.reports.render import markdown, markdown_table, print_report, write_report
from outrider.eval.reports.report import ContestantInfo

from ..conftest import make_report

ACCEPTED = [[4, 1, 0], [2, 2], [0, 3, 1, 4], [1, 1, 0]]
NOTHING = Interval(math.nan, math.nan, math.nan)
VOID = {"meta", "link", "br", "img", "hr", "input"}


@pytest.fixture
def report() -> Report:
    return make_report(ACCEPTED, temperatures=(0.0, 1.0))


def test_a_saved_report_reads_back_equal(report, tmp_path):
    folder = write_report(report, tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json", "report.md"]
    assert Report.load(folder) == Report.load(folder / "report.json") == report


def test_numbers_that_do_not_exist_are_null_in_valid_json(tmp_path):
    """One prompt gives values without intervals."""
    folder = write_report(make_report([[1, 2]]), tmp_path)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert values["figures"][0]["tau"] == {"value": 2.5, "low": None, "high": None}
    assert not Report.load(folder).headline().tau.known


def test_a_report_of_before_there_were_figures_by_place_is_still_read(report, tmp_path):
    values = json.loads(report.to_json())
    for part in (*values["figures"], *values["records"]):
        part.pop("positions", None)
        part.pop("kinds")
    del values["checksum"]
    (tmp_path / "report.json").write_text(json.dumps(values))
    loaded = Report.load(tmp_path)
    assert loaded.headline().positions == []
    assert "Acceptance by" not in markdown(loaded)


def test_acceptance_by_position_and_by_kind_stands_in_both_pages(report, tmp_path):
    """Kinds that no token was of have no column."""
    folder = write_report(report, tmp_path)
    text = (folder / "report.md").read_text(encoding="utf-8")
    _, table = text.split("### Acceptance by kind of token")[:2]
    assert table.split("\n")[2] == "| contestant | copied | word |"
    assert re.match(r"\| draft \| 0\.\d\d \[0\.\d\d, 0\.\d\d\] of \d+ \|", table.split("\n")[4])
    own, other = report.headline(), report.headline("plain")  # one that reached no word
    other.kinds = [p.model_copy(update={"reached": 0, "alpha": NOTHING} if p.part == "word" else {}) for p in own.kinds]
    assert re.search(r"\| plain \| 0\.\S+ \[.*\] of \d+ \| – \|", markdown_table(tables.by_kind(report, 0.0)))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<caption>Acceptance by position in the answer</caption>") == 2
    assert 'data-name="1–16"' in page


def test_the_floors_share_stands_beside_the_phases_with_what_it_is_made_of(report):
    """Above 1, too; without it there is no column, and no line about memory."""
    assert "floor ÷ round |" not in markdown(report)
    assert "memory" not in markdown(report).split("## Conditions")[1].split("## Def")[0]
    report.conditions.pass_bytes = 1200
    report.conditions.read_bandwidth = 2.5e9
    report.conditions.probe_bytes = 4096
    for figures in report.overall(0.0):
        figures.floor_share = Interval(1.25, 1.1, 1.4) if figures.contestant == "plain" else None
    text = markdown(report)
    assert re.search(r"\| plain \|.* 1.25 \[1.10, 1.40\] \|", text)
    assert "reads 1,200 bytes of weights; memory is read at 2.5 GB/s, the best of a few reads of 4,096 bytes" in text


def test_the_headline_is_about_the_first_drafter_over_all_suites(report):
    figures = report.headline()
    assert (figures.contestant, figures.temperature, figures.suite) == ("draft", 0.0, "all")
    assert figures.tau.value == pytest.approx(1 + 19 / 12)
    assert re.fullmatch(
        r"draft, depth 4: τ 2\.58 \[\d\.\d\d, \d\.\d\d\], "
        r"2\.00× \[all alike\] the speed of the plain target at temperature 0",
        report.sentence(),
    )
    assert report.sentence(temperature=1.0).endswith("at temperature 1 (rejection)")


def test_asking_for_what_was_not_measured_names_what_was(report):
    with pytest.raises(BadInputError, match="no contestant 'medusa'; it has: draft, plain"):
        report.headline("medusa")
    with pytest.raises(BadInputError, match=r"temperatures measured: 0\.0, 1\.0"):
        report.headline("draft", 0.7)


def test_markdown_and_page_carry_definitions_conditions_and_divergences(report, tmp_path):
    folder = write_report(report, tmp_path)
    said = (
        "tokens emitted per round",
        "a CPU",
        "float32",
        "batch size 1",
        "draft 3/4",
        "first differing token",
        "rejection",
    )
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text(encoding="utf-8")
        assert [wanted for wanted in said if wanted not in text] == [], name


class Page(HTMLParser):
    """Checks nesting, and collects addresses, tags and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def html(report, tmp_path) -> str:
    return (write_report(report, tmp_path) / "report.html").read_text(encoding="utf-8")


def test_the_page_is_well_formed_escapes_what_it_is_given_and_asks_for_nothing_from_outside(html):
    assert "&lt;p &amp; 0&gt;" in html
    assert "<p & 0>" not in html
    assert "<code>outrider tune</code>" in html
    page = Page()
    page.feed(html)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not any(name in attributes for _, attributes in page.tags for name in ("src", "href", "onclick"))
    assert not re.search(r"url\(|@import", html)
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_says_what_its_plots_show_and_follows_the_colour_scheme(html):
    page = Page()
    page.feed(html)
    plots = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(plots) == 6
    assert all("draft" in (attributes["aria-label"] or "") for attributes in plots)
    assert "prefers-color-scheme: dark" in html
    for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
        ElementTree.fromstring(svg)
        assert not re.search(r'(fill|stroke)="', svg)


def test_the_page_tells_accepted_drafts_and_the_targets_own_tokens_apart_round_by_round(report, tmp_path):
    """Whatever the texts are; one that is longer than what is kept ends where that does."""
    report.records[0].text = ["<p>", "a", "\n", "c", "d", "E", "f", "G"]
    report.conditions.command = "outrider eval '<a & b>'"
    page = (write_report(report, tmp_path) / "report.html").read_text(encoding="utf-8")
    answer = '<b>&lt;p&gt;</b><mark class="r1">a↵\ncd</mark><b>E</b><mark class="r2">f</mark><b>G</b></pre>'
    assert f">{answer}" in page
    assert "Best: code, &lt;p &amp; 0&gt;, τ 2.67, 9 tokens in 3 rounds of draft, the first 8<" in page
    assert "<code>outrider eval &#39;&lt;a &amp; b&gt;&#39;</code>" in page


def test_a_report_without_drafters_is_printed_without_plots(report, tmp_path):
    figures = [f for f in report.figures if f.contestant == "plain"]
    plain = report.model_copy(update={"contestants": report.contestants[1:], "figures": figures, "records": []})
    text = (write_report(plain, tmp_path) / "report.html").read_text(encoding="utf-8")
    assert "<figure>" not in text
    assert "plain: τ 1.00" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_terminal_table_fits_its_width(report, width):
    out = io.StringIO()
    print_report(report, Console(file=out, width=width))
    text = out.getvalue()
    assert "draft, depth 4" in text
    assert "2.00× [all alike]" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no report at"),
        ("{", "not valid JSON"),
        ("[]", "schema_version is None"),
        ('{"schema_version": 99}', "schema_version is 99, this Outrider reads 1"),
        ('{"schema_version": 1}', "conditions: field required"),
    ],
)
def test_what_is_not_a_report_is_refused_with_the_reason(content, message, tmp_path):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(BadInputError, match=message):
        Report.load(tmp_path)


def test_an_interrupted_write_leaves_the_old_report_whole(report, tmp_path, monkeypatch):
    write_report(report, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        os.ftruncate(descriptor, 7)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(report, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def loaded_by(module: str) -> list[str]:
    """Heavy libraries that importing a module loads."""
    heavy = ("torch", "transformers", "matplotlib", "datasets", "scipy")
    code = f"import sys, {module}; print(*[m for m in {heavy} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_room_loads_no_heavy_library_and_what_shows_reports_no_torch():
    """Every module of `eval.reports`; intervals need scipy."""
    assert loaded_by("outrider.eval") == []
    modules = [f"outrider.eval.reports.{m.name}" for m in pkgutil.iter_modules(reports.__path__)]
    assert len(modules) >= 7
    assert loaded_by(", ".join(modules)) == ["scipy"]


def test_a_plan_that_drafts_nothing_is_called_so() -> None:
    """As where a tuner finds that no drafts pay."""
    plain = ContestantInfo(name="eagle3 tuned", kind="drafter", depth=0, shape="depth 0", tuned=True)
    assert plain.label == "eagle3 tuned, without drafts"
