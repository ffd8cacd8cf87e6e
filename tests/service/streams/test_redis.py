"""`undertow consume redis` against a real Redis server."""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.tenants.registry import ArenaFull
from undertow.serving.streams.consumer import Consumer
from undertow.serving.streams.redis_streams import RedisSource

from ...support.cli import Ran, run, tenants
from ...support.cluster.processes import Command, FreshCommand
from ...support.service.streams import (
    SLOWLY,
    TENANTS,
    RedisServer,
    Shared,
    ingested,
    kill_at_random,
    said,
    stored,
    stream_of,
    turns_in,
)


def arguments(server: RedisServer, store: Path, *more: str) -> tuple[str | Path, ...]:
    place = ("--url", server.url, "--stream", "chat", "--group", "g", "--consumer", "one")
    return ("consume", "redis", *place, "--store", store, "--llm", "off", "--json", *more)


def consumed(server: RedisServer, store: Path, *more: str, **env: str) -> Ran:
    return run(*arguments(server, store, "--until-end", *more), env=env)


def pending(server: RedisServer) -> int:
    found: Any = server.client.xpending("chat", "g")
    return int(found["pending"])


def test_a_stream_is_stored_as_a_file_is_and_its_entries_again_change_nothing(
    server: RedisServer, tmp_path: Path
) -> None:
    lines = stream_of(40)
    expected = ingested(tmp_path, lines)
    server.add("chat", lines)
    done = consumed(server, tmp_path / "s")
    assert (done.code, done.doc["read"], done.doc["stored"], done.doc["already_there"]) == (0, 120, 120, 0)
    assert stored(tmp_path / "s") == expected
    assert pending(server) == 0
    server.client.xgroup_setid("chat", "g", "0")  # each entry is delivered again
    again = consumed(server, tmp_path / "s").doc
    assert (again["read"], again["stored"], again["already_there"]) == (120, 0, 120)
    assert stored(tmp_path / "s") == expected


def test_kills_at_random_moments_lose_and_double_nothing(server: RedisServer, tmp_path: Path) -> None:
    lines = stream_of(1_500)
    expected = ingested(tmp_path, lines)
    store = tmp_path / "s"
    command = arguments(server, store)
    assert kill_at_random(partial(server.add, "chat"), command, store, lines, seed=1) >= 1
    assert (consumed(server, store).code, pending(server)) == (0, 0)
    assert stored(store) == expected


def test_sigterm_ends_after_a_batch_and_the_next_run_reads_on(server: RedisServer, tmp_path: Path) -> None:
    lines = stream_of(600)
    server.add("chat", lines[:900])
    store = tmp_path / "s"
    with FreshCommand(tmp_path / "c", *arguments(server, store), **SLOWLY) as running:
        running.wait_until(lambda: turns_in(store) > 0)
        running.process.send_signal(signal.SIGTERM)
        report = running.result()
    assert report["stored"] == report["read"] == turns_in(store) > 0
    assert pending(server) == 0
    server.add("chat", lines[900:])
    rest = consumed(server, store).doc
    assert (rest["stored"], rest["already_there"]) == (len(lines) - report["read"], 0)
    assert stored(store) == ingested(tmp_path, lines)


BAD: dict[str, tuple[dict[Any, Any], str | None]] = {
    "not JSON": ({"tenant": "ada", "message": "{nope"}, None),
    "no JSON object": ({"tenant": "ada", "message": "[1]"}, None),
    "an unknown kind of role": (
        {"tenant": "ada", "message": '{"messages": [{"role": 5, "content": "x"}]}'},
        "messages[0].role",
    ),
    "no tenant": ({"message": '{"messages": [{"role": "user", "content": "x"}]}'}, "tenant"),
    "two tenants": (
        {"tenant": "ada", "message": '{"tenant": "bo", "messages": [{"role": "user", "content": "x"}]}'},
        "tenant",
    ),
    "too large": (
        {"tenant": "ada", "message": json.dumps({"messages": [{"role": "user", "content": "x" * 2_000}]})},
        "messages[0].content",
    ),
    "no message": ({"tenant": "ada", "text": "x"}, "message"),
    "bad UTF-8": ({b"tenant": b"\xff", b"message": b"{}"}, "tenant"),
}


def test_bad_entries_are_set_aside_with_place_field_and_cure(server: RedisServer, tmp_path: Path) -> None:
    lines = stream_of(60)
    server.add("chat", lines[:90])
    ids = [server.client.xadd("chat", fields) for fields, _ in BAD.values()]
    server.add("chat", lines[90:])
    done = consumed(server, tmp_path / "s", "--dead-letter", "dead", UNDERTOW_MAX_MESSAGE_BYTES="1000")
    assert (done.code, done.doc["stored"], done.doc["dead_lettered"]) == (0, len(lines), len(BAD))
    assert stored(tmp_path / "s") == ingested(tmp_path, lines)
    letters: Any = server.client.xrange("dead")
    assert [fields[b"undertow.id"] for _, fields in letters] == ids
    for (fields, field), (_, letter) in zip(BAD.values(), letters, strict=True):
        original = {_bytes(name): _bytes(value) for name, value in fields.items()}
        assert original.items() <= letter.items()
        assert letter[b"undertow.stream"] == b"chat"
        assert letter[b"undertow.field"].decode() == (field or "")
        assert letter[b"undertow.reason"] and letter[b"undertow.cure"]
    assert pending(server) == 0


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()


def test_without_a_dead_letter_stream_a_bad_entry_ends_the_run_and_stays(
    server: RedisServer, tmp_path: Path
) -> None:
    lines = stream_of(20)
    server.add("chat", lines[:30])
    bad = server.client.xadd("chat", BAD["no tenant"][0])
    server.add("chat", lines[30:])
    for read in (30, 0):
        done = consumed(server, tmp_path / "s")
        assert (done.code, done.doc["stored"]) == (3, read)
        assert f"chat/{bad.decode()}: field 'tenant'" in done.err and "--dead-letter" in done.err
    assert pending(server) == 31
    rest = consumed(server, tmp_path / "s", "--dead-letter", "dead").doc
    assert (rest["stored"], rest["already_there"], rest["dead_lettered"]) == (30, 0, 1)
    assert stored(tmp_path / "s") == ingested(tmp_path, lines)


def test_a_store_that_is_full_is_tried_again_then_reported_and_nothing_is_lost(
    server: RedisServer, shared: Shared
) -> None:
    lines = stream_of(100)
    server.add("chat", lines)
    warnings: list[str] = []

    def consumer(patience_s: float) -> Consumer:
        source = RedisSource(server.url, "chat", "g", "one")
        return Consumer(
            source,
            shared,
            max_message_bytes=10_000,
            sets_aside=False,
            until_end=True,
            patience_s=patience_s,
            on_warning=warnings.append,
        )

    shared.full = 10**6
    with pytest.raises(ArenaFull):
        consumer(0.5).run()
    assert warnings == ["the arena has no room; it is tried again for up to 0.5 s."]
    assert pending(server) == 256 and not shared.engine.tenants.loaded()
    shared.full, shared.room = 10, 7  # it empties after a while, and takes no whole batch then
    run = consumer(30.0)
    run.run()
    assert (run.report.read, run.report.stored, pending(server)) == (len(lines), len(lines), 0)
    for tenant in TENANTS:
        assert shared.said(tenant) == said(lines, tenant)


@pytest.mark.rarely
def test_a_server_that_is_gone_is_waited_for_and_one_that_stays_away_is_reported(
    server: RedisServer, tmp_path: Path
) -> None:
    lines = stream_of(100)
    server.add("chat", lines[:150])
    store = tmp_path / "s"
    with Command(tmp_path / "c", *arguments(server, store, "--patience", "30")) as running:
        running.wait_until(lambda: turns_in(store) == 150)
        server.stop()
        time.sleep(1)
        assert running.running, running.err
        server.start()
        server.add("chat", lines[150:])
        running.wait_until(lambda: turns_in(store) == len(lines))
        running.process.send_signal(signal.SIGTERM)
        running.result()
    assert pending(server) == 0
    assert stored(store) == ingested(tmp_path, lines)
    server.stop()
    gone = consumed(server, store, "--patience", "1")
    assert gone.code == 1 and "Redis cannot be used" in gone.err


def test_entries_of_a_dead_consumer_are_taken_over_and_deleted_ones_are_told(
    server: RedisServer, tmp_path: Path
) -> None:
    lines = stream_of(20)
    ids = server.add("chat", lines)
    server.client.xgroup_create("chat", "g", "0")
    server.client.xreadgroup("g", "dead", {"chat": ">"}, count=30)
    server.client.xdel("chat", ids[7])
    done = consumed(server, tmp_path / "s", "--claim-idle", "1", "--dead-letter", "set-aside")
    assert (done.code, done.doc["stored"], done.doc["dead_lettered"]) == (0, 59, 1)
    letters: Any = server.client.xrange("set-aside")
    assert [fields[b"undertow.id"] for _, fields in letters] == [ids[7]]
    assert b"was deleted" in letters[0][1][b"undertow.reason"]
    assert pending(server) == 0
    assert sum(tenants(tmp_path / "s").values()) == 59


def test_a_missing_extra_and_a_wrong_url_are_named(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = run(
        "consume", "redis", "--url", "http://x", "--stream", "s", "--group", "g", "--store", tmp_path / "s"
    )
    assert wrong.code == 1 and "Redis URL" in wrong.err
    named = ("--stream", "s", "--group", "g", "--store", tmp_path / "s")
    by_variable = run("consume", "redis", *named, env={"UNDERTOW_REDIS_URL": "http://x"})
    assert by_variable.code == 1 and "Redis URL" in by_variable.err, "the variable is known, and read"
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    lacking = consumed(server, tmp_path / "s")
    assert lacking.code == 1 and "undertow[streams]" in lacking.err
    assert not (tmp_path / "s").exists()
