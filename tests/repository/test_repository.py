"""The pages and forms of those who contribute: keys as GitHub documents them, links to files, the version."""

import re
from importlib.metadata import version
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"markdown": {"value"}, "textarea": {"label"}, "dropdown": {"options"}, "checkboxes": {"options"}}


def test_forms_and_workflows_have_the_keys_that_github_requires() -> None:
    told = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github").rglob("*.yml")}
    for form in (told["bug.yml"], told["feature.yml"]):
        assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels"}
        assert all(NEEDED[part["type"]] <= part["attributes"].keys() for part in form["body"])
    assert all("schedule" in of for of in told["dependabot.yml"]["updates"]) and told["ci.yml"]["jobs"]


def test_pages_lead_to_files_and_the_changelog_has_the_version() -> None:
    pages = {page: page.read_text() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    links = [(at, to) for at in pages for to in re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", pages[at])]
    assert not [(at, to) for at, to in links if not (at.parent / to).exists()]
    assert f"[{version('undertow')}]" in pages[ROOT / "CHANGELOG.md"]
