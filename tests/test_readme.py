"""The README's examples: its Python runs as it stands, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undertow.bench.mock_llm import spawn_server

from .cli_harness import run

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SERVER = "http://localhost:8000/v1"


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = [code for language, code in BLOCKS if language == "python"]
    assert SERVER in example
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    with spawn_server() as url:
        monkeypatch.setenv("UNDERTOW_LLM_URL", url)
        exec(compile(example.replace(SERVER, url), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("turn ")
    assert "I signed up for the pottery course." in printed
    assert (tmp_path / "memories" / "store.json").exists()


def test_every_command_named_exists() -> None:
    shell = "\n".join(code for language, code in BLOCKS if language in ("", "sh", "bash", "console"))
    named = set(re.findall(r"^undertow (\w+)", shell, re.MULTILINE))
    named |= set(re.findall(r"`undertow (\w+)", README))
    assert {"ingest", "search", "ask", "explain"} <= named
    for command in sorted(named):
        done = run(command, "--help")
        assert done.code == 0, f"undertow {command}: {done.err}"
