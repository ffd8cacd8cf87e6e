"""Export and import: a tenant somewhere is one here, whatever it has lived through; all of it or nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.export import ExportBroken
from undertow.engine.api.transfer.import_ import TenantExists
from undertow.engine.base.model import InputError, PolicyName
from undertow.engine.base.queries import ImportCommand
from undertow.engine.base.results import ImportReport, Report
from undertow.engine.cluster.routing.errors import ShardGone
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.tenants import log
from undertow.engine.tenants.registry import UnknownTenant

from ...support.api.transfer import REPLIES, act, engine_at, exported, nameless, resealed, said, seen
from ...support.cluster.in_process import LocalShards, begin
from ...support.cluster.in_process import settings as cluster_settings
from ...support.engine import bytes_hold, rows_of, settings_of
from ...support.faults.harness import THETA, Driver


def place(record: Report) -> tuple[Any, ...]:
    """In the log: commits have another order in runs that decide the same, as replies take their time."""
    at = record.get("made_at_seq", record.get("seq", -1))
    birth = [record.get(name, -1) for name in ("born_at_seq", "ordinal", "version")]
    return (at, record["kind"], *birth, record.get("state", ""))


CHANGES = [f"{act} {what}" for act in ("delete", "update") for what in ("turn", "memory")]
ACTS = ("add", "drain", "flush", "replay", *CHANGES)
LIVES = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 40)), max_size=14)
# the log read again, once, and once broken off for another change
CHANGE = ("change policy", 1)
CHANGED = [CHANGE, ("add", 3), ("delete turn", 3), ("drain", 0), ("delete turn", 2), ("update memory", 1)]
BROKEN_OFF = [("delete turn", 4), CHANGE, ("add", 7), ("change policy", 0), ("add", 9), ("drain", 0)]
UNDER_WAY = [CHANGE, *[("step", 0)] * 8]
BY_SHARE: dict[str, Any] = {"theta_sim": None, "theta_merge": None, "theta_share": 0.2}
PEERS = [*[("add", n) for n in range(8)], ("drain", 0), ("delete turn", 1), ("drain", 0), ("add", 9)]
ASKED = [("flush", 0), ("drain", 0), ("ask", 0), ("ask", 1), ("drain", 0), ("ask", 2)]


@example(life=UNDER_WAY, limit=1000, policy="recmem", vectors=False, by_share=False)
@example(life=ASKED, limit=1000, policy="himem", vectors=False, by_share=False)
@example(life=PEERS, limit=1000, policy="a-mem", vectors=False, by_share=False)
@example(life=PEERS, limit=1000, policy="memory-os", vectors=False, by_share=False)
@example(life=CHANGED, limit=1000, policy="recmem", vectors=False, by_share=True)
@example(life=BROKEN_OFF, limit=7, policy="recmem", vectors=False, by_share=False)
@example(
    life=[("add", 2), ("add", 4)], limit=1000, policy="recmem", vectors=False, by_share=True
)  # closed while a job is under way
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    life=LIVES,
    limit=st.sampled_from([1, 7, 1000]),
    policy=st.sampled_from(get_args(PolicyName)),
    vectors=st.booleans(),
    by_share=st.booleans(),
)
def test_an_imported_tenant_is_as_the_one_that_was_exported(
    tmp_path_factory: pytest.TempPathFactory,
    life: list[tuple[str, int]],
    limit: int,
    policy: str,
    vectors: bool,
    by_share: bool,
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "THETA_TURNS", 4)
        options: dict[str, Any] = {"policy": policy, **(BY_SHARE if by_share else {})}
        check_import(folder, life, limit, options, vectors=vectors)


def check_import(
    folder: Path, life: list[tuple[str, int]], limit: int, options: dict[str, Any], *, vectors: bool
) -> None:
    with engine_at(folder / "a", **options) as here:
        here.add_batch([said("ann", n) for n in range(100, 112)])
        assert here.drain()
        for what, n in life:
            act(here, "ann", what, n)
    # opened again: a job under way may have read a turn before that was deleted, one from the log has not
    with engine_at(folder / "a", **options) as here, engine_at(folder / "b", **options) as there:
        records = exported(here, "ann", limit=limit, vectors=vectors)
        there.add_batch([said("bob/2", n) for n in range(3)])
        there.erase("bob/2")  # so that the name lives its second life
        done = there.import_("bob/2", records)
        counts = [sum(r["kind"] == kind for r in records) for kind in ("turn", "episode", "fact", "decision")]
        assert done == ImportReport(*counts)
        copy = exported(there, "bob/2", vectors=vectors)
        assert nameless(copy, "bob/2") == nameless(records, "ann")
        assert not {r["id"] for r in copy if "id" in r} & {r["id"] for r in records if "id" in r}
        here.drain(), there.drain()
        assert seen(there, "bob/2") == seen(here, "ann")
        for what, n in (("add", 20), ("add", 30), ("delete turn", 3), ("replay", 0)):
            for engine, tenant in ((here, "ann"), (there, "bob/2")):
                act(engine, tenant, what, n)
        here.drain(), there.drain()
        assert seen(there, "bob/2") == seen(here, "ann")
    with engine_at(folder / "a", **options) as here, engine_at(folder / "b", **options) as there:
        copy, records = (sorted(exported(*of), key=place) for of in ((there, "bob/2"), (here, "ann")))
        assert nameless(copy, "bob/2") == nameless(records, "ann")


# ---- one export for all that follows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """An export with every kind of record, decision and control."""
    with engine_at(tmp_path_factory.mktemp("source") / "s") as engine:
        engine.add_batch([said("ann", n) for n in range(40)])
        assert engine.drain()
        engine.replay_jobs()
        for what, n in (("delete turn", 3), ("update turn", 5), ("update memory", 1), ("delete memory", 2)):
            act(engine, "ann", what, n)
            assert engine.drain()
        act(engine, "ann", "flush", 0)
        engine._llm = engine.scheduler.llm_calls.llm = None  # what comes now waits
        engine.add_batch([said("ann", n) for n in range(60, 70)])
        act(engine, "ann", "update memory", 3)
        return exported(engine, "ann")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_at(tmp_path / "store") as engine:
        yield engine


def test_the_export_has_every_kind_of_thing(source: list[Report]) -> None:
    inner = {"turn", "episode", "fact", "decision", "control", "job"}
    assert {r["kind"] for r in source} == inner | {"export", "end"}
    decisions = [r["decision"] for r in source if r["kind"] == "decision"]
    assert set(decisions) == {"waits", "merged", "fired", "parked"}
    controls = [r for r in source if r["kind"] == "control"]
    assert {r["control"] for r in controls} == {"settings", "flush", "delete", "update", "replay"}
    assert any("replaced_by" in r["body"] for r in controls)
    assert {r["state"] for r in source if r["kind"] == "job"} == {"parked", "replayed"}
    assert max(r["seq"] for r in source if r["kind"] == "turn") > len(decisions), "some are undecided"


def refuses(engine: Engine, records: Sequence[Report]) -> str:
    """The refusal, which has left nothing."""
    before = engine.journal.next_lsn
    with pytest.raises(InputError) as refusal:
        engine.import_("bob", records)
    assert engine.journal.next_lsn == before and "bob" not in engine.tenants
    return str(refusal.value)


def test_an_export_that_was_cut_off_reordered_or_edited_is_refused(
    source: list[Report], engine: Engine
) -> None:
    middle = len(source) // 2
    assert "cut off" in refuses(engine, source[:middle])
    assert "cut off" in refuses(engine, source[:-1])
    assert "beginning is missing" in refuses(engine, source[1:])
    assert "beginning is missing" in refuses(engine, [])
    turn = next(n for n, r in enumerate(source) if r["kind"] == "turn" and n > middle)
    lost = refuses(engine, [*source[:turn], *source[turn + 1 :]])
    assert "Import the export as it was written" in lost
    edited = {**source[turn], "messages": [{"role": "user", "content": "something else"}]}
    assert f"import:{len(source)}: field 'fingerprint'" in refuses(
        engine, [*source[:turn], edited, *source[turn + 1 :]]
    )
    assert "no JSON object" in refuses(engine, [*source[:turn], 7, *source[turn:]])  # type: ignore[list-item]
    assert "format" in refuses(engine, [{**source[0], "format": 2}, *source[1:]])
    assert engine.import_("bob", source).turns, "the whole of it is taken"


ODD: list[Any] = [None, -1, 0, 3, 10**6, 1.5, "", "x", "\ud800", "a\x00b", [], [0], [999], {}, True]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_forged_export_is_refused_or_makes_a_sound_tenant(
    source: list[Report], engine: Engine, data: st.DataObject
) -> None:
    """Whatever stands in an export with a right fingerprint: what is taken in can be read, and goes on."""
    n = data.draw(st.integers(1, len(source) - 2), label="record")
    records = list(source)
    match data.draw(st.sampled_from(["drop", "double", "swap", "field", "body"]), label="how"):
        case "drop":
            del records[n]
        case "double":
            records.insert(n, records[n])
        case "swap":
            m = data.draw(st.integers(1, len(source) - 2), label="with")
            records[n], records[m] = records[m], records[n]
        case how:
            inner = records[n].get("body") or records[n] if how == "body" else records[n]
            name = data.draw(st.sampled_from(sorted(inner)), label="field")
            changed = {**inner, name: data.draw(st.sampled_from(ODD), label="value")}
            records[n] = changed if inner is records[n] else {**records[n], "body": changed}
    with suppress(TypeError):  # no JSON: the engine is to say so
        records = resealed(records)
    try:
        engine.import_("bob", records)
    except InputError as refusal:
        assert refusal.problem.source == "import" and refusal.problem.cure
        assert "bob" not in engine.tenants
        return
    seen(engine, "bob")
    exported(engine, "bob", vectors=True)
    engine.add_batch([said("bob", 900)])
    engine.drain()
    assert engine.search("bob", said("bob", 900).text).turns
    engine.erase("bob")


# ---- conflicts, repeats, bounds


def test_a_tenant_that_has_anything_is_left_as_it_is(source: list[Report], engine: Engine) -> None:
    engine.add_batch([said("bob", 1)])
    before = exported(engine, "bob")
    for records in (source, []):
        with pytest.raises(TenantExists, match="'bob' is here already"):
            engine.call(ImportCommand("bob", records, again=True))
    assert exported(engine, "bob") == before
    engine.erase("bob", now=True)
    done = engine.import_("bob", source)
    for repeat in (source, exported(engine, "bob")):
        with pytest.raises(TenantExists):
            engine.import_("bob", repeat)
    engine.add_batch([said("bob", 2)])
    assert engine.call(ImportCommand("bob", source, again=True)) == done
    with pytest.raises(TenantExists):
        engine.call(ImportCommand("bob", resealed([*source[:-2], source[-1]]), again=True))
    engine.set_policy("cy", "eager")
    with pytest.raises(TenantExists, match="if only with deleted turns or a policy"):
        engine.import_("cy", source)
    engine.erase("cy", now=True)
    assert engine.import_("cy", source) == done


def test_what_comes_between_the_steps_of_an_import_stays(source: list[Report], engine: Engine) -> None:
    begun = engine.begin_import(ImportCommand("bob", source))
    assert engine.go_on_importing(begun) is None
    engine.add_batch([said("bob", 1)])
    with pytest.raises(TenantExists):
        engine.go_on_importing(begun)
    assert [r["seq"] for r in engine.list("bob").items] == [0]
    begun = engine.begin_import(ImportCommand("cy", source))
    assert engine.go_on_importing(begun) is None
    engine.add_batch([said("cy", 1)])
    engine.erase("cy")  # ids would be those of the life that has ended
    with pytest.raises(TenantExists):
        engine.go_on_importing(begun)


@pytest.mark.parametrize("name", ["", "a\x00b", "\ud800"])
def test_a_name_that_no_tenant_can_have_is_refused(name: str, source: list[Report], engine: Engine) -> None:
    with pytest.raises(InputError, match="tenant"):
        engine.import_(name, source)


def test_an_export_larger_than_the_bound_is_refused(source: list[Report], tmp_path: Path) -> None:
    with engine_at(tmp_path, max_import_bytes=10_000) as engine:
        assert "larger than 10,000 bytes" in refuses(engine, source)


def test_texts_are_embedded_by_the_store_that_takes_them(source: list[Report], tmp_path: Path) -> None:
    by_cosine = settings_of(**THETA, search="dense")
    with Engine(tmp_path, by_cosine, HashingEncoder(128), llm=MockLLM(REPLIES)) as engine:
        engine.import_("bob", source)
        hit = engine.search("bob", said("bob", 60).text).turns[0]
        assert hit.memory == said("bob", 60).text and hit.score == pytest.approx(1.0, abs=1e-3)
    assert {len(row.vector) for row in rows_of(tmp_path, "turn") if row.vector is not None} == {128}


# ---- pages


def test_words_deleted_between_two_pages_do_not_come_in(tmp_path: Path) -> None:
    with engine_at(tmp_path / "a") as here, engine_at(tmp_path / "b") as there:
        here.add_batch([said("ann", n) for n in range(30)])
        assert here.drain()
        page = here.export_page("ann", limit=45)
        records = [*page.items]
        doomed = [r for r in records if r["kind"] == "turn" and r["seq"] < 8]
        for turn in doomed:
            here.delete(turn["id"])
        here.add_batch([said("ann", 99)])
        assert here.drain()
        while page.after:
            page = here.export_page("ann", after=page.after, limit=45)
            records += page.items
        there.import_("bob", records)
        there.drain()
        assert seen(there, "bob") == seen(here, "ann")
        words = {m["content"] for turn in doomed for m in turn["messages"] if m["role"] == "user"}
    assert words and not any(bytes_hold(tmp_path / "b", text) for text in words)


def test_pages_of_another_life_or_place_are_refused(tmp_path: Path) -> None:
    with engine_at(tmp_path / "a") as engine, engine_at(tmp_path / "b") as other:
        for one in (engine, other):
            one.add_batch([said("ann", n) for n in range(5)])
        page = engine.export_page("ann", limit=2)
        with pytest.raises(ExportBroken, match="Begin the export again"):
            other.export_page("ann", after=page.after)
        engine.erase("ann")
        with pytest.raises(UnknownTenant):
            engine.export_page("ann", after=page.after)
        engine.add_batch([said("ann", n) for n in range(5)])
        with pytest.raises(ExportBroken):
            engine.export_page("ann", after=page.after)
        for wrong in ({"after": "x"}, {"after": "a.b.c.d"}, {"limit": 0}, {"limit": 10**9}):
            with pytest.raises(InputError):
                engine.export_page("ann", **wrong)


# ---- killed


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["append_stream", "_acknowledge"])
def test_killed_around_its_commit_an_import_is_there_whole_or_not_at_all(
    method: str, after: bool, source: list[Report], tmp_path: Path, driver: Driver
) -> None:
    file = tmp_path / "export.jsonl"
    file.write_bytes(b"\n".join(map(orjson.dumps, source)))
    task = {"task": "import", "file": file, "tenant": "bob", "settings": {**THETA, "encoder": "hash:64"}}
    store = tmp_path / "store"
    kill = {"method": method, "n": 1, "after": after}
    assert driver.run(store=store, kill=kill, **task).status == -signal.SIGKILL
    stored = (method, after) != ("append_stream", False)
    with engine_at(store) as engine:
        assert ("bob" in engine.tenants) == stored
        done = engine.call(ImportCommand("bob", source, again=True))
        assert done.turns == sum(r["kind"] == "turn" for r in source)
        engine.resume()
        engine.drain()
        found = seen(engine, "bob")
    with engine_at(tmp_path / "whole") as undisturbed:
        undisturbed.import_("bob", source)
        undisturbed.drain()
        assert found == seen(undisturbed, "bob")


# ---- over shards


class LosesOneAnswer(LocalShards):
    """Shards of which the one that has first stored an import dies before it can say so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lost = 0

    def calls(self, name: str) -> Any:
        calls, shards = super().calls(name), self

        class Calls:
            async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
                answer = await calls.call(method, *args, **kwargs)
                if method == "ask" and isinstance(args[0], ImportCommand) and not shards.lost:
                    shards.lost += 1
                    shards.kill(name)
                    raise ShardGone(f"shard {name} was killed")
                return answer

        return Calls()


def test_over_shards_an_import_is_stored_once_though_its_answer_is_lost(
    source: list[Report], tmp_path: Path
) -> None:
    root = begin(tmp_path / "root", 2)
    shards = LosesOneAnswer(root, cluster_settings())
    with shards, Router(root, shards.calls, ClusterSettings(patience_s=60)) as router:
        names = [f"tenant {n}" for n in range(4)]
        done = [router.import_(name, source) for name in names]
        assert shards.lost == 1 and len(set(done)) == 1
        assert router.drain()
        with pytest.raises(TenantExists):
            router.import_(names[0], source)
        copies = {nameless(exported(router, name, limit=50), name) for name in names}
        assert len(copies) == 1


def test_thetas_that_turns_told_are_refused_where_the_settings_fix_them(tmp_path: Path) -> None:
    with engine_at(tmp_path) as engine:
        engine.add_batch([said("ann", n) for n in range(3)])
        assert engine.drain()
        records = exported(engine, "ann")
        decision = next(r for r in records if r["kind"] == "decision")
        decision["thetas"] = {"theta_sim": -1.0}
        with pytest.raises(InputError, match="settings in force have fixed"):
            engine.import_("bob", resealed(records))
