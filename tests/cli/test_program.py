"""The program itself: help, version, wrong usage, and running as a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from undertow.serving.cli import progress

from ..support.cli import ENV, PROGRAM, run
from ..support.llm_servers import wait_until

TURNS = 24
COMMANDS = (
    "ingest search ask list explain get history export update delete erase jobs stats calibrate reindex "
    "doctor"
)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from undertow.serving.cli import app\n"
        "heavy = {'torch', 'sentence_transformers', 'lance', 'pyarrow', 'numba', 'openai', 'pydantic'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_is_read_without_the_libraries_of_the_engine(built: Path) -> None:
    code = """
import sys
from undertow.serving.cli import app
for command in ("list", "explain", "export"):
    owner = [] if command == "list" else ["--tenant", "ada"]
    app([command, *owner, "--store", sys.argv[1]], standalone_mode=False)
print(sorted({"torch", "numba", "pandas", "faiss", "transformers", "openai"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(built)], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_words_as_vectors_are_stored_and_found_without_torch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from undertow import Engine, Settings, make_encoder
settings = Settings()
with Engine(Path(sys.argv[1]), settings, make_encoder(settings)) as engine:
    engine.add("ada", [{"role": "user", "content": "The bees swarmed in May."}])
    engine.drain()
    assert engine.search("ada", "When did the bees swarm?").turns
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "s"], env=ENV, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    shown = run("--version")
    assert (shown.code, shown.out) == (0, f"undertow {project['version']}\n")


def test_help_lists_every_command_of_the_contract_and_the_exit_codes() -> None:
    shown = run("--help").out
    assert [c for c in COMMANDS.split() if f" {c} " not in shown] == []
    assert "Exit codes" in shown


def test_readable_output_holds_no_escape_codes(built: Path) -> None:
    for command in (
        "list --kind tenants",
        "list --kind episodes --tenant ada --all",
        "explain --tenant ada",
        "stats",
        "jobs",
        "calibrate --share 0.1",
    ):
        done = run(*command.split(), "--store", built)
        assert (done.code, "\x1b" in done.out, bool(done.out.strip())) == (0, False, True), command


def test_calibrate_proposes_the_quantile_of_pair_cosines(built: Path) -> None:
    wide = run("calibrate", "--store", built, "--share", "0.3", "--theta-count", "3", "--json").doc
    tight = run("calibrate", "--store", built, "--share", "0.05", "--tenant", "bo", "--json").doc
    assert wide["theta_sim"] < tight["theta_sim"]
    assert (wide["tenants"], wide["turns"], wide["pairs"]) == (2, 2 * TURNS, TURNS * (TURNS - 1))
    assert (tight["tenants"], tight["theta_count"]) == (1, 5)
    assert -1 < wide["memories"]["theta_compare"] <= tight["memories"]["theta_compare"] <= 1
    assert all(p["triggers"] > 0 for p in wide["proposals"] if p["share"] >= 0.3)
    assert run("calibrate", "--store", built, "--share", "2").code == 2
    few = run("calibrate", "--store", built, "--tenant", "bo")
    assert (few.code, few.out, "too few turns" in few.err) == (1, "", True)
    rare = run("calibrate", "--store", built, "--share", "0.02", "--theta-count", "24")
    assert "No threshold is proposed" in rare.out and "Use:" not in rare.out


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("UNDERTOW_THETA_SMI", "UNDERTOW_THETA_SIM"),
        ("UNDERTOW_POLCY", "UNDERTOW_POLICY"),
        ("UNDERTOW_XYZZY", "unset"),
    ],
)
def test_a_misspelt_variable_is_refused(built: Path, variable: str, near: str) -> None:
    for command in (("doctor",), ("ingest", __file__), ("search", "x", "--tenant", "bo")):
        done = run(*command, "--store", built, env={variable: "0.5"})
        assert (done.code, done.out) == (2, "")
        assert f"{variable} is no setting" in done.err and near in done.err
    assert run("doctor", "--llm", "off", env={"UNDERTOW_API_KEY": "ut_x"}).code == 0


def test_what_cannot_be_asked_for_is_wrong_use(built: Path) -> None:
    ada = ("--tenant", "ada", "--store", built)
    asked = run("ask", "what of the boat?", *ada, "--llm", "off")
    assert (asked.code, "--llm URL" in asked.err) == (2, True)
    other = run("policy", "foo", *ada)
    assert (other.code, "recmem, eager, nemori" in other.err) == (2, True)


def test_doctor_finds_what_is_wrong(built: Path, server: str) -> None:
    fine = run("doctor", "--store", built, "--llm", server, "--json").doc["findings"]
    assert {"encoder", "store", "llm server", "python"} <= {f["what"] for f in fine if f["ok"]}
    wrong = run("doctor", "--store", built, "--llm", "http://127.0.0.1:9/v1", "--encoder", "hash:x", "--json")
    found = {f["what"]: f for f in wrong.doc["findings"]}
    assert wrong.code == 1
    assert "cannot be reached" in found["llm server"]["text"]
    assert "hash:384" in found["encoder"]["text"]
    assert "attention" in run("doctor", "--llm", "off").out


def test_wrong_usage_is_exit_2(tmp_path: Path, log: Path, built: Path) -> None:
    ingest = ("ingest", log, "--store", tmp_path / "s")
    search = ("search", "--tenant", "ada", "--store", built)
    for args in (
        (*ingest, "--theta-sim", "1.5"),
        (*ingest, "--llm", "not a url"),
        ("ingest", tmp_path / "nothing.jsonl", "--store", tmp_path / "s"),
        (*ingest, "--format", "xml"),
        ("list", "--kind", "turns", "--store", built),
        ("list", "--kind", "tenants", "--tenant", "ada", "--store", built),
        (*search, "boat", "--since", "yesterday"),
        (*search, "  "),
    ):
        done = run(*args)
        assert (done.code, done.out) == (2, ""), args
        assert done.err.strip()
    refused = run(*ingest, env={"UNDERTOW_THETA_COUNT": "0"})
    assert (refused.code, "theta_count" in refused.err) == (2, True)
    assert not (tmp_path / "s").exists()
    assert run("stats", "--store", built, env={"UNDERTOW_THETA_COUNT": "0"}).code == 0, "it uses no threshold"


def test_the_program_runs_as_a_process(tmp_path: Path, log: Path) -> None:
    command = [*PROGRAM, "ingest", str(log), "--store", str(tmp_path / "s"), "--llm", "off", "--json"]
    done = subprocess.run(command, env=ENV | {"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["turns"] == 2 * TURNS
    export = f"{' '.join(PROGRAM)} export --tenant ada --store {tmp_path / 's'} --vectors | head -c 10"
    env = ENV | {"PATH": "/usr/bin:/bin"}
    closed = subprocess.run(export, shell=True, env=env, capture_output=True, text=True)
    assert (len(closed.stdout), closed.stderr) == (10, "")


def test_the_first_minute_needs_no_llm() -> None:
    done = run("quickstart", "--json", env={"UNDERTOW_THETA_SIM": "0.4"})
    assert done.code == 0
    assert (done.doc["turns"], len(done.doc["searches"])) == (60, 3)
    for search in done.doc["searches"]:
        words = {word.partition(" ~ ")[0] for word in search["matched"]}
        assert words and words <= set(re.findall(r"\w+", search["query"].lower()))
        assert any(word in search["found"].lower() for word in words)
    shown = run("quickstart", env={"UNDERTOW_THETA_SIM": "0.4"}).out
    assert "no LLM call" in shown and shown.count("Why     score") == 3
    assert f": first at turn {done.doc['recurred_at']}." in shown
    assert shown.count("\n  turn ") == 5
    assert "No topic comes back" in run("quickstart", env={"UNDERTOW_THETA_SIM": "1"}).out


def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LONG_S", 0.01)
    with progress.said_if_long("Waiting for the LLM server."):
        wait_until(lambda: "Waiting for the LLM server." in capsys.readouterr().err)
