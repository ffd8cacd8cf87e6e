"""Repair: the damaged rows of the log go, the rest is as it was, and the store is whole again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.journal import JournalError

from ...support.cli import run

SETTINGS = Settings(device="cpu", llm_url=None)
ENCODER = HashingEncoder(64)


def added(store: Path) -> Path:
    """A store whose log has six turns of two tenants, each in a commit of its own; returns the segment."""
    engine = Engine(store, SETTINGS, ENCODER)
    for n in range(3):
        for tenant in ("ann", "bob"):
            engine.add(
                tenant, [{"role": "user", "content": f"the boat {n} of {tenant}"}], idempotency_key=f"{n}"
            )
    assert engine.journal._lock is not None
    engine.journal._lock.close()  # as a kill leaves it
    (segment,) = (store / "wal").glob("*.log")
    return segment


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_turn_that_is_lost_counts_as_deleted_and_can_be_added_again(tmp_path: Path, lost: int) -> None:
    store = tmp_path / "store"
    segment = added(store)
    data = segment.read_bytes()
    place = data.index(f"the boat {lost} of ann".encode())
    segment.write_bytes(data[:place] + b"X" + data[place + 1 :])
    for writable in (False, True):
        with pytest.raises(JournalError, match=r"is damaged at byte.*undertow repair"):
            Engine(store, SETTINGS, ENCODER, writable=writable)
    done = run("repair", "--store", store, "--yes", "--json")
    assert done.code == 0, done.err
    assert len(done.doc["damages"]) == 1
    # after the last record of a log nothing shows that there was another
    assert done.doc["lost"] == ({"ann": [lost]} if lost < 2 else {})
    with Engine(store, SETTINGS, ENCODER) as engine:
        engine.resume()
        assert engine.drain()
        words = [f"the boat {n} of {t}" for n in range(3) for t in ("ann", "bob") if (n, t) != (lost, "ann")]
        found = [h.memory for t in ("ann", "bob") for h in engine.search(t, "the boat").turns]
        assert sorted(text.removeprefix("user: ") for text in found) == sorted(words)
        message = {"role": "user", "content": f"the boat {lost} of ann"}
        (receipt,) = engine.add("ann", [message], idempotency_key=f"{lost}")
        assert not receipt.duplicate
    again = run("repair", "--store", store, "--yes", "--json")
    assert json.loads(again.out) == {"damages": [], "lost": {}}
