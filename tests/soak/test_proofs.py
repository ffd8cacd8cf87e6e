"""The machinery of the long proofs, at a small size; `make soak` runs them whole."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from undertow.bench.machine import source_tree

from ..support.cluster.processes import all_ended
from ..support.llm_servers import wait_until
from ..support.soak import large_store
from ..support.soak.proofs import PROOFS, RESULTS, Proof, added, of_test, progress, run, saved

COUNTING = """
import os, sys, time
from pathlib import Path
from tests.support.soak.runs import report
n = int(sys.argv[1])
report(seen=2, most_max=9 - n, last=str(n))
"""


def counting(code: str = COUNTING, **more: Any) -> Proof:
    return Proof(lambda _, n: (sys.executable, "-c", code, str(n)), ("seen", 5), "counts by two", **more)


TOY = counting()


def go_on(folder: Path, proof: Proof = TOY, tree: str = "tree", name: str = "toy", **more: Any) -> Any:
    return run(name, proof, results=folder, work=folder / "work", source=lambda: tree, **more)


def test_counts_add_up_over_runs_of_one_tree(tmp_path: Path) -> None:
    lines: list[str] = []
    for seconds, units in ((0.0, 0), (0.001, 1), (60.0, 3), (60.0, 3)):
        figures = go_on(tmp_path, seconds=seconds, tell=lines.append)["figures"]
        assert (figures.get("units", 0), figures.get("seen", 0)) == (units, 2 * units)
        assert saved(tmp_path, "toy").get("reached") == {0: None, 1: False, 3: True}[units]
    state = saved(tmp_path, "toy")
    assert state["figures"] == {"seen": 6, "most_max": 9, "last": "2", "units": 3}
    about = [state[name] for name in ("source", "command", "goal", "failed")]
    assert about == ["tree", "make soak PROOF=toy", {"seen": 5}, []] and state["elapsed_s"] > 0
    assert len(lines) == 3 and lines[-1].startswith("toy: 6 of 5 seen")


def test_of_another_source_or_without_its_files_a_proof_begins_anew(tmp_path: Path) -> None:
    lines: list[str] = []
    go_on(tmp_path, seconds=0.001)
    assert progress(TOY, saved(tmp_path, "toy"), "other") == "2 of 5 seen on an earlier source"
    for proof in (TOY, counting(keeps=True)):
        state = go_on(tmp_path, proof, tree="other", seconds=0.001, tell=lines.append)
        assert (state["source"], state["figures"]["units"]) == ("other", 1)
    assert ["begins anew" in line for line in lines] == [True, False] * 2


def test_files_of_earlier_shapes_are_of_an_earlier_source(tmp_path: Path) -> None:
    assert all(progress(proof, saved(RESULTS, name), "tree") for name, proof in PROOFS.items())
    (tmp_path / "soak-toy.json").write_text('{"soak": "toy", "seen": 4, "seconds": 600.0}')
    assert progress(TOY, saved(tmp_path, "toy"), "tree") == "4 of 5 seen on an earlier source"
    assert go_on(tmp_path)["figures"]["seen"] == 6


def test_a_unit_that_fails_is_recorded_and_counts_nothing(tmp_path: Path) -> None:
    go_on(tmp_path, seconds=0.001)
    for failed in ([1], [1, 1]):
        with pytest.raises(RuntimeError, match="unit 1 failed\n\nthe disk is full"):
            go_on(tmp_path, counting(COUNTING + "raise SystemExit('the disk is full')"))
        assert saved(tmp_path, "toy")["failed"] == failed
    with pytest.raises(RuntimeError, match="unit 1 told nothing"):
        go_on(tmp_path, counting("print('skipped')"))
    trees = iter(("tree", "changed"))
    with pytest.raises(RuntimeError, match="the source changed during unit 1"):
        run("toy", TOY, results=tmp_path, work=tmp_path, source=lambda: next(trees))
    assert progress(TOY, saved(tmp_path, "toy"), "tree") == "2 of 5 seen, failed units: [1, 1]"
    state = go_on(tmp_path)
    assert (state["figures"]["seen"], state["failed"]) == (6, [1, 1])
    assert go_on(tmp_path, tree="mended", seconds=0.001)["failed"] == []


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")  # none is open here
def test_a_kill_loses_the_unit_under_way_alone(tmp_path: Path) -> None:
    """Two proofs at once, and one of them is killed in its second unit, whose process ends too."""
    waits = tmp_path / "waits"
    code = f"""
if n == 1 and not Path({str(waits)!r}).exists():
    Path({str(waits)!r}).write_text(f"{{os.getpid()}}")
    time.sleep(60)
"""
    proofs = {"killed": counting(COUNTING + code), "other": TOY}
    fork = multiprocessing.get_context("fork")
    runs = {n: fork.Process(target=go_on, args=(tmp_path, p), kwargs={"name": n}) for n, p in proofs.items()}
    for process in runs.values():
        process.start()
    wait_until(lambda: waits.exists() and bool(waits.read_text()))
    unit = psutil.Process(int(waits.read_text()))
    runs["killed"].kill()
    assert not all_ended([unit])
    assert saved(tmp_path, "killed")["figures"] == {"seen": 2, "most_max": 9, "last": "0", "units": 1}
    assert go_on(tmp_path, proofs["killed"], name="killed")["figures"]["seen"] == 6
    runs["other"].join(30)
    assert saved(tmp_path, "other")["figures"]["units"] == 3 and not list(tmp_path.glob("soak-*.draft"))


def test_figures_of_several_units() -> None:
    before = {"n": 1, "by": {"a": 2}, "rss_max": 5, "flat": True, "share": 0.5}
    more = {"n": 3, "by": {"a": 1, "b": 1}, "rss_max": 4, "flat": True, "share": 0.25}
    assert added(before, more) == {"n": 4, "by": {"a": 3, "b": 1}, "rss_max": 5, "flat": True, "share": 0.25}


def test_every_proof_names_tests_that_are_there(tmp_path: Path) -> None:
    assert len(PROOFS) >= 12
    for proof in PROOFS.values():
        paths = [word for word in proof.command(tmp_path, 0) if word.endswith(".py")]
        assert all(Path(__file__).parents[2].joinpath(path).exists() for path in paths)
    assert of_test("x", ("n", 1), "", A=1).env == {"A": "1"}


def test_the_tree_is_of_the_source_alone(tmp_path: Path) -> None:
    trees = []
    for name in ("engine/a.py", "docs/results/soak-toy.json", "tests/__pycache__/a.pyc", "tests/a.py"):
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text("1")
        trees.append(source_tree(tmp_path))
    assert trees[0] == trees[1] == trees[2] != trees[3]


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
