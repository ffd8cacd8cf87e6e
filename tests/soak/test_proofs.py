"""The machinery of the long proofs, at a small size; `make soak` runs them whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from undertow.bench.machine import source_tree

from ..support.soak import large_store
from ..support.soak.proofs import PROOFS, Proof, added, of_test, run

COUNTING = (
    'import json, sys; print(json.dumps({"seen": 2, "most_max": 9 - int(sys.argv[1]), "last": sys.argv[1]}))'
)


def counting(code: str = COUNTING) -> Proof:
    return Proof(lambda _folder, n: (sys.executable, "-c", code, str(n)), ("seen", 5), "counts by two")


def test_counts_add_up_over_runs_of_one_tree(tmp_path: Path) -> None:
    told: list[str] = []
    for seconds, units in ((0.0, 0), (0.001, 1), (60.0, 3), (60.0, 3)):
        counts = run(
            "toy", counting(), seconds=seconds, state=tmp_path / "tree", results=tmp_path, tell=told.append
        )
        assert (counts["units"], counts.get("seen", 0)) == (units, 2 * units)
        assert (tmp_path / "soak-toy.json").exists() == (units == 3)
    result = json.loads((tmp_path / "soak-toy.json").read_text())
    assert (result["seen"], result["most_max"], result["last"]) == (6, 9, "2")
    assert result["source"] == "tree" and result["command"] == "make soak PROOF=toy"
    assert len(told) == 3 and told[-1].startswith("toy: 6 of 5 seen")
    assert run("toy", counting(), seconds=0.0, state=tmp_path / "other", results=tmp_path)["units"] == 0


def test_a_unit_that_fails_counts_nothing(tmp_path: Path) -> None:
    for code in ("raise SystemExit('the disk is full')", "print('no figures')"):
        with pytest.raises(RuntimeError, match="unit 0 failed"):
            run("toy", counting(code), state=tmp_path, results=tmp_path)
    assert not list(tmp_path.iterdir())


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
    assert source_tree() == source_tree()


def test_a_large_store_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 turns through ingest, upgrade, reindex, export, import and erasure; each unit may run twice."""
    for name, value in {"TURNS": 2_000, "TENANT_TURNS": 50, "PARTS": 2}.items():
        monkeypatch.setattr(large_store, name, value)
    assert len(large_store.units()) == 9
    for stage, part in large_store.units():
        for _ in range(2 if part else 1):
            turns = large_store.DO[stage](tmp_path, part)
        assert turns == {"erase": 200}.get(stage, 2_000 if stage in large_store.WHOLE else 1_000)
    assert large_store.disk_bytes(tmp_path) > 100_000
