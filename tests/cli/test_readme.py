"""The README and the operators' page: the Python runs as it stands, commands and settings exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.base.config import Settings
from undertow.serving.auth.principal import Scope

from ..support.cli import run
from ..support.service.http import serving

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README", "docs/service", "docs/cluster", "docs/operations")  # an example in each of the first three
README = "".join((ROOT / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
SETTINGS = {f"UNDERTOW_{name.upper()}": field for name, field in Settings.model_fields.items()}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SERVER = "http://localhost:8000/v1"
SERVICE, KEY = "http://localhost:8080", "ut_..."


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_example(0, tmp_path, monkeypatch, capsys)
    assert printed.startswith("turn ")
    assert "I signed up for the pottery course." in printed
    assert (tmp_path / "memories" / "store.json").exists()


@pytest.mark.usefixtures("ray_address")
def test_the_cluster_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_example(2, tmp_path, monkeypatch, capsys)
    assert "I signed up for the pottery course." in printed
    assert (tmp_path / "cluster-memories" / "map" / "00000001.json").exists()


def test_the_client_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = PYTHON[1]
    assert SERVICE in example and KEY in example
    with serving(tmp_path) as service:
        key = service.key(Scope.READ, Scope.WRITE, prefix="acme/")
        exec(compile(example.replace(SERVICE, service.url).replace(KEY, key), "README.md", "exec"), {})
    assert "I signed up for the pottery course." in capsys.readouterr().out


def run_example(
    which: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run a block of Python as it stands, against a mock server; what it printed."""
    example = PYTHON[which]
    assert SERVER in example
    monkeypatch.chdir(folder)
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    with spawn_server() as url:
        monkeypatch.setenv("UNDERTOW_LLM_URL", url)
        exec(compile(example.replace(SERVER, url), "README.md", "exec"), {})
    return capsys.readouterr().out


def test_every_command_named_exists() -> None:
    shell = "\n".join(code for language, code in BLOCKS if language in ("", "sh", "bash", "console"))
    named = set(re.findall(r"^undertow (\w+)", shell, re.MULTILINE))
    named |= set(re.findall(r"`undertow (\w+)", README))
    assert {"ingest", "search", "ask", "explain"} <= named
    for command in sorted(named):
        done = run(command, "--help")
        assert done.code == 0, f"undertow {command}: {done.err}"


@pytest.mark.parametrize("name", ["UNDERTOW_WORDS_ROWS", "UNDERTOW_IVF_ROWS"])
def test_the_operators_page_has_the_bounds_of_a_large_tenant_with_their_defaults(name: str) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert f"{SETTINGS[name].default:,}" in re.findall(rf"`{name}`[^(]*\(([\d,]+)\)", page)


def test_the_readme_names_the_settings_of_word_search() -> None:
    named = set(re.findall(r"`(UNDERTOW_\w+)`", README))
    assert {"UNDERTOW_SEARCH", "UNDERTOW_WORDS_ROWS"} <= named & set(SETTINGS)
