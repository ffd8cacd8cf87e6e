"""`undertow export --parquet`: tables that `ingest` takes back."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from ..support.cli import THETAS, contents, run


def test_all_tenants_go_through_parquet_into_a_store_with_the_same_memories(
    built: Path, tmp_path: Path, server: str
) -> None:
    done = run("export", "--store", built, "--parquet", tmp_path / "out", "--vectors")
    turns, memories = (pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in ("turns", "memories"))
    assert (done.code, done.doc["turns"], done.doc["memories"]) == (0, turns.num_rows, memories.num_rows)
    exported = {
        name: run("export", "--store", built, "--tenant", name, "--vectors").lines for name in ("ada", "bo")
    }
    for table, kinds in ((turns, {"turn"}), (memories, {"episode", "fact"})):
        rows = table.rename_columns({"vectors": "vector"}).to_pylist()
        records = [r for name in ("ada", "bo") for r in exported[name] if r["kind"] in kinds]
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            told = row.keys() & record.keys() - {"messages", "metadata"}
            assert row.keys() - told <= {"messages", "metadata", "idempotency_key", "timestamp_from"}
            assert {name: row[name] for name in told} == {name: record[name] for name in told}

    other = tmp_path / "other"
    ingest = ("ingest", tmp_path / "out" / "turns.parquet", "--store", other, "--llm", server, *THETAS)
    taken = run(*ingest, "--json")
    assert (taken.code, taken.doc["warnings"], "warning" in taken.err) == (0, 0, False), taken.err
    for tenant in ("ada", "bo"):
        before, after = contents(built, tenant), contents(other, tenant)
        for kind in ("turns", "episodes", "facts"):
            said = [
                [(m["text"], m["timestamp"], m.get("messages")) for m in c[kind]] for c in (before, after)
            ]
            assert said[0] and said[0] == said[1]
        assert [r["decision"] for r in before["explain"]] == [r["decision"] for r in after["explain"]]
    assert run(*ingest, "--json").doc["run"]["new_turns"] == 0


def test_one_tenant_can_be_written_and_without_parquet_it_must_be_named(built: Path, tmp_path: Path) -> None:
    done = run("export", "--store", built, "--tenant", "bo", "--parquet", tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "turns.parquet")
    assert (done.code, set(table["tenant"].to_pylist()), "vectors" in table.column_names) == (
        0,
        {"bo"},
        False,
    )
    (tmp_path / "file").write_text("")
    unwritable = run("export", "--store", built, "--parquet", tmp_path / "file")
    assert (unwritable.code, str(tmp_path / "file") in unwritable.err) == (1, True)
    nobody = run("export", "--store", built, "--tenant", "nobody", "--parquet", tmp_path / "none")
    assert (nobody.code, "nobody" in nobody.err, list(tmp_path.glob("none/*.parquet"))) == (1, True, [])
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"turns.parquet", "memories.parquet"}
    assert not list((tmp_path / "none").iterdir()), "what was begun is gone"
    unnamed = run("export", "--store", built)
    assert (unnamed.code, "--tenant" in unnamed.err and "--parquet" in unnamed.err) == (2, True)
