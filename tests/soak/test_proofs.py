"""The machinery of the long proofs, at a small size; `make soak` runs them whole."""

from __future__ import annotations

import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from undertow.bench.machine import ROOT

from ..support.cluster.processes import all_ended
from ..support.llm_servers import wait_until
from ..support.soak import large_store
from ..support.soak.proofs import PROOFS, Proof, added, of_test, path_of, progress, run, saved
from ..support.soak.rare import FILES

TOY_TEST = "tests/toy/test_toy.py"
COUNTING = """
import os, sys, time
from pathlib import Path
from tests.support.soak.runs import report
n = int(sys.argv[1])
report(seen=2, most_max=9 - n, last=str(n))
"""


def counting(code: str = "", **more: Any) -> Proof:
    words = (sys.executable, "-c", COUNTING + code)
    return Proof(lambda _folder, n: (*words, str(n), TOY_TEST), ("seen", 5), "counts by two", **more)


TOY = counting()


def change_source(root: Path, name: str = "engine/new.py") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()


def test_counts_add_up_over_runs_of_one_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, units in ((0.0, 1), (0.0, 2), (600.0, 3), (600.0, 3)):
        figures = run("toy", TOY, seconds, tmp_path)["figures"]
        assert (figures["units"], figures["seen"]) == (units, 2 * units)
        assert saved("toy", tmp_path)["reached"] == (units == 3)
    state = saved("toy", tmp_path)
    assert state["figures"] == {"seen": 6, "most_max": 9, "last": "2", "units": 3}
    about = [state[name] for name in ("source", "command", "goal", "failed")]
    assert about == [TOY.source(tmp_path), "make soak PROOF=toy", {"seen": 5}, []] and state["elapsed_s"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1].startswith("toy: 6 of 5 seen")


def test_the_rare_cases_of_every_file_are_of_the_proof() -> None:
    assert "tests/engine/step/test_equivalence.py" in FILES
    assert Path(__file__).relative_to(ROOT).as_posix() not in FILES
    assert PROOFS["rare"].command(Path(), 1)[-len(FILES) :] == FILES


def test_a_proof_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When what its units run is another, which other test files are not, and when its store is gone."""
    run("toy", TOY, 0.0, tmp_path)
    change_source(tmp_path, "tests/toy/test_other.py")
    assert run("toy", TOY, 0.0, tmp_path)["figures"]["units"] == 2
    for changed in ("engine/new.py", "tests/support/new.py", "tests/toy/new.json", TOY_TEST):
        change_source(tmp_path, changed)
        told = progress(TOY, saved("toy", tmp_path), TOY.source(tmp_path))
        assert told.endswith("of 5 seen on an earlier source"), changed
        assert run("toy", TOY, 0.0, tmp_path)["figures"]["units"] == 1
    assert run("toy", counting(keeps=True), 0.0, tmp_path)["figures"]["units"] == 1
    assert capsys.readouterr().out.count("begins anew") == 5


def test_files_of_earlier_shapes_are_of_an_earlier_source(tmp_path: Path) -> None:
    assert all(progress(proof, saved(name), "tree") for name, proof in PROOFS.items())
    run("toy", TOY, 0.0, tmp_path)
    path_of("toy", tmp_path).write_text('{"soak": "toy", "seen": 4, "seconds": 600.0}')
    assert progress(TOY, saved("toy", tmp_path), "tree") == "4 of 5 seen on an earlier source"
    assert run("toy", TOY, root=tmp_path)["figures"]["seen"] == 6


def test_a_unit_that_fails_is_recorded_and_counts_nothing(tmp_path: Path) -> None:
    run("toy", TOY, 0.0, tmp_path)
    for failed in ([1], [1, 1]):
        with pytest.raises(RuntimeError, match="unit 1 failed\n\nthe disk is full"):
            run("toy", counting("sys.exit('the disk is full')"), root=tmp_path)
        assert saved("toy", tmp_path)["failed"] == failed
    with pytest.raises(RuntimeError, match="unit 1 told nothing"):
        run("toy", Proof(lambda *_: ("true",), TOY.goal, ""), root=tmp_path)
    told = progress(TOY, saved("toy", tmp_path), TOY.source(tmp_path))
    assert told == "2 of 5 seen, failed units: [1, 1]"
    state = run("toy", TOY, root=tmp_path)
    assert (state["figures"]["seen"], state["failed"]) == (6, [1, 1])
    change_source(tmp_path)
    assert run("toy", TOY, 0.0, tmp_path)["failed"] == []
    with pytest.raises(RuntimeError, match="the source changed during unit 1"):
        run("toy", counting(f"Path({str(tmp_path / 'engine' / 'new.py')!r}).unlink()"), root=tmp_path)


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")  # nothing of it is open here
def test_a_kill_loses_the_unit_under_way_alone(tmp_path: Path) -> None:
    """Two proofs at once, and one of them is killed in its second unit, whose process ends too."""
    waits = tmp_path / "waits"
    code = f"""
if n == 1 and not Path({str(waits)!r}).exists():
    Path({str(waits)!r}).write_text(f"{{os.getpid()}}")
    time.sleep(60)
"""
    proofs = {"killed": counting(code), "other": TOY}
    fork = multiprocessing.get_context("fork")
    runs = {n: fork.Process(target=run, args=(n, proof, 600, tmp_path)) for n, proof in proofs.items()}
    for process in runs.values():
        process.start()
    wait_until(lambda: waits.exists() and bool(waits.read_text()))
    unit = psutil.Process(int(waits.read_text()))
    runs["killed"].kill()
    assert not all_ended([unit])
    assert saved("killed", tmp_path)["figures"] == {"seen": 2, "most_max": 9, "last": "0", "units": 1}
    assert run("killed", proofs["killed"], root=tmp_path)["figures"]["seen"] == 6
    runs["other"].join(300)
    assert saved("other", tmp_path)["figures"]["units"] == 3


def test_figures_of_several_units() -> None:
    before = {"n": 1, "by": {"a": 2}, "rss_max": 5, "flat": True, "share": 0.5}
    more = {"n": 3, "by": {"a": 1, "b": 1}, "rss_max": 4, "flat": True, "share": 0.25}
    assert added(before, more) == {"n": 4, "by": {"a": 3, "b": 1}, "rss_max": 5, "flat": True, "share": 0.25}


def test_every_proof_names_tests_that_are_there(tmp_path: Path) -> None:
    assert len(PROOFS) >= 12
    paths = {word for p in PROOFS.values() for word in p.command(tmp_path, 0) if word.endswith(".py")}
    assert all((ROOT / path).exists() for path in paths)
    assert of_test("x", ("n", 1), "", A=1).env == {"A": "1"}
    for path in (ROOT / "tests").rglob("*.py"):  # another test file is none of its source
        if not path.match("test_*.py") or str(path.relative_to(ROOT)) in paths:
            assert not re.search(r"^ *(from|import) .*\btest_\w+( import|,|$)", path.read_text(), re.M), path


def test_a_large_store_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 turns through ingest, upgrade, reindex, export, import and erasure; each unit may run twice."""
    for name, value in {"TURNS": 240, "TENANT_TURNS": 20, "PARTS": 2}.items():
        monkeypatch.setattr(large_store, name, value)
    assert len(large_store.units()) == 9
    for stage, part in large_store.units():
        for _ in range(2 if part else 1):
            turns = large_store.DO[stage](tmp_path, part)
        assert turns == {"erase": 40}.get(stage, 240 if stage in large_store.WHOLE else 120)
    assert large_store.disk_bytes(tmp_path) > 100_000
