"""The manual: its reference has every setting, its navigation every page; a broken link fails the build."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

pytest.importorskip("sphinx")
DOCS = Path(__file__).resolve().parents[2] / "docs"


class Planted(BaseSettings):
    # what this one means
    told: int = 1

    untold: int = 2


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return import_module("reference")


def test_the_settings_page_names_every_setting(reference: Any) -> None:
    lines = {line.split()[-1] for line in "\n".join(reference.settings()).splitlines() if line}
    for model in reference.SETTINGS.values():
        assert {f"{model.model_config['env_prefix']}{name}".upper() for name in model.model_fields} <= lines


def test_a_setting_without_words_fails_the_build(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SETTINGS", {"Planted": Planted})
    with pytest.raises(ValueError, match="UNTOLD has no words"):
        list(reference.settings())


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^(?:.+<)?((?!reference/)[\w/-]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    # all decisions stand below their README
    assert set(listed) == {page for page in pages if not re.match("reference/|index$|decisions/0", page)}


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    links = " ".join(f"[a]({to})" for to in ("index.md#there", "none.md", "#none", "../none.py"))
    (tmp_path / "index.md").write_text(f"# Page\n\n## There\n\n{links}\n")
    options = ["-qW", "-c", str(DOCS), "-D", "extensions=myst_parser", "-b", "dummy"]
    command = [sys.executable, "-m", "sphinx", *options, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.findall(r"target not found: '(\S+)'", done.stderr) == ["none.md", "none", "../none.py"], (
        done.stderr
    )
