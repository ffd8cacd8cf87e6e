"""MessageReader: records of a stream, read as columns, are what they are one by one."""

from __future__ import annotations

import json
from typing import Any

from undertow.engine.readers import MessageReader


def value(n: int, **more: Any) -> bytes:
    said = [{"role": "user", "content": f"day {n}"}, {"role": "assistant", "content": "noted"}]
    return json.dumps({"session": "s", "messages": said, **more}).encode()


def test_columns_are_the_messages_one_by_one() -> None:
    odd = {
        0: b"\xff{",
        3: b"",
        4: b"nope",
        5: value(5, tenant="other"),
        6: value(6, tenant="ada"),
        7: json.dumps(json.loads(value(7)), indent=1).encode(),  # over several lines
        8: b"[1]",
        9: value(9, idempotency_key="its own"),
        10: value(10, tenant=5),
        60: b'{"tenant": "ada"}{"tenant": "ada"}',
        70: b'{"messages": [{"role": "user", "content": "a\nb"}]}',
        99: b" ",
    }
    values = [odd.get(n, value(n)) for n in range(100)]
    keys = [f"chat/{n}" for n in range(100)]
    block = MessageReader("chat", 1_000).block(values, ["ada"] * 100, keys)
    refused = {record.position: record.errors[0].field for record in block.problems}
    assert refused == {
        0: None,
        3: None,
        4: None,
        5: "tenant",
        8: None,
        10: "tenant",
        60: None,
        70: None,
        99: None,
    }
    assert block.positions.tolist() == [n for n in range(100) if n not in refused]
    assert block.turns["key"].to_pylist() == [
        "its own:0" if n == 9 else f"chat/{n}:0" for n in block.positions.tolist()
    ]
    assert set(block.turns["tenant"].to_pylist()) == {"ada"}
    reader = MessageReader("chat", 1_000)
    alone = [reader.block([v], ["ada"], [k]) for v, k in zip(values, keys, strict=True)]
    assert [row for one in alone for row in one.turns.to_pylist()] == block.turns.to_pylist()
    assert [n for n, one in enumerate(alone) if one.problems] == sorted(refused)
