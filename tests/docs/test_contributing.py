"""What an outside contributor finds is real: the workflow, the hooks, the templates and the project's addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


def test_the_workflow_runs_what_ci_runs_with_actions_pinned_by_their_commits() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["./.ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []
    assert f">={job['strategy']['matrix']['python'][0]}" == PROJECT["requires-python"]


def test_hooks_run_what_the_test_command_runs() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    script = (ROOT / "scripts/test").read_text()
    commands = [hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in repository["hooks"]]
    assert commands == ["ruff check", "ruff format", "lint-imports"]
    assert [command for command in commands if command not in script] == []


def test_issue_templates_ask_for_what_a_report_needs() -> None:
    forms = [yaml.safe_load(file.read_text()) for file in sorted(TEMPLATES.glob("*.yml")) if file.stem != "config"]
    assert [set(form) for form in forms] == [{"name", "description", "labels", "body"}] * 2
    assert "outrider doctor" in [part["attributes"]["label"] for part in forms[0]["body"]]


def test_every_address_is_of_the_one_repository() -> None:
    urls = PROJECT["urls"]
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    links = [link["url"] for link in yaml.safe_load((TEMPLATES / "config.yml").read_text())["contact_links"]]
    assert urls.pop("Documentation") == yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["site_url"]
    assert [url for url in [*urls.values(), *links] if not url.startswith(urls["Source"])] == []
    pages = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/main/" in url]
    assert [page for page in pages if not (ROOT / page).is_file()] == []
