"""Journal rows as reports: which rows are withheld, the form of the others, and the bounds of a page.

Every report is made of str, int, float, list, dict and None, ready to be written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

import orjson

from undertow.engine.base.model import InputError, Memory, spoken
from undertow.engine.base.results import Report
from undertow.engine.policies.base import Thresholds
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import (
    Control,
    control_of,
    job_of,
    memory_of,
    messages_of,
    outdated_updates,
)


def thresholds_in_force(
    controls: Iterable[Control], decisions: Mapping[int, Mapping[str, Any]]
) -> Callable[[int], Report]:
    """The thresholds in force at a record by its seq, `since_seq` and their `origin`.

    `origin`: "settings" if both thetas are fixed; else "turns" once the tenant's own turns told them, and
    "prior" before. `decisions`: the bodies by seq, of one generation.
    """
    stated = [(c.seq + 1, Thresholds(**c.body)) for c in controls if c.kind == "settings"]
    found = [(since, kept, "prior" if kept.shares else "settings") for since, kept in stated]
    for seq in sorted(seq for seq, body in decisions.items() if body.get("thetas")):
        before = max((entry for entry in found if entry[0] <= seq), key=itemgetter(0))
        found.append((seq + 1, replace(before[1], **decisions[seq]["thetas"]), "turns"))

    def at(seq: int) -> Report:
        since, kept, origin = max((entry for entry in found if entry[0] <= seq), key=itemgetter(0))
        return {**kept.body, "origin": origin, "since_seq": since}

    return at


class Withheld:
    """Rows of one tenant with a deleted turn's words, which a crash may have left for the next purge.

    Those are the turn itself, the versions older than one that was made at the deletion's seq, and updates
    of which there is a copy without words.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """`rows`, oldest first: the control records, and every version of the memories in question."""
        deletions = deleted_turns(rows)
        seqs = {row.seq for row in deletions.values()}
        self._turns = deletions.keys()
        self._remade_lsn = {
            row.id: row.lsn for row in rows if row.kind in ("episode", "fact") and row.seq in seqs
        }
        self._outdated = set(outdated_updates(rows))

    def __contains__(self, row: Row) -> bool:
        if row.kind in ("turn", "vector"):
            return row.seq in self._turns
        if row.kind == "control":
            return row.lsn in self._outdated
        return row.kind in ("episode", "fact") and row.lsn < self._remade_lsn.get(row.id, -1)


def deleted_turns(rows: Sequence[Row]) -> dict[int, Row]:
    """The control row that deleted it, by seq of the deleted turn."""
    return {seq: row for row in rows if (seq := deleted_turn(row)) is not None}


def deleted_turn(row: Row) -> int | None:
    """The seq of the turn that a row deletes, if it does that."""
    if row.kind != "control":
        return None
    control = control_of(row)
    return int(control.body["turn_seq"]) if control.kind == "delete" and "turn_seq" in control.body else None


def deleted_turn_ids(rows: Sequence[Row]) -> list[str]:
    return [control_of(row).body["id"] for row in rows if deleted_turn(row) is not None]


def versions_of(rows: Sequence[Row]) -> list[Memory]:
    """The versions in `rows` (oldest first), each with the seq of the one that replaced it."""
    found = [memory_of(row) for row in rows]
    next_seq: dict[str, int] = {}
    for i in range(len(found) - 1, -1, -1):
        memory = found[i]
        found[i] = replace(memory, superseded_at_seq=next_seq.get(memory.id))
        next_seq[memory.id] = memory.made_at_seq
    return found


def turn_report(row: Row) -> Report:
    body = orjson.loads(row.payload)
    return {
        "id": row.id,
        "kind": "turn",
        "tenant": row.tenant,
        "seq": row.seq,
        "made_at_seq": row.seq,
        "superseded_at_seq": None,
        "session": body["session"],
        "timestamp": row.timestamp,
        **({"timestamp_from": "arrival"} if body.get("arrived") else {}),
        "text": spoken(messages_of(body)),
        "messages": body["messages"],
        "metadata": body.get("metadata", {}),
    }


def memory_report(memory: Memory) -> Report:
    report = asdict(memory)
    for name in ("links", "index_text"):
        if not report[name]:
            del report[name]  # as exports of before had it
    report["source_messages"] = [list(message) for message in memory.source_messages]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in report.items()}


def row_report(row: Row) -> Report:
    if row.kind == "turn":
        return turn_report(row)
    if row.kind in ("episode", "fact"):
        return memory_report(memory_of(row))
    head: Report = {"kind": row.kind, "tenant": row.tenant, "seq": row.seq}
    if row.kind == "job":
        return head | job_report(row)
    body = orjson.loads(row.payload)
    if row.kind == "control":
        return {**head, "control": body["kind"], "body": body["body"]}
    return {**head, **body}


def job_report(row: Row) -> Report:
    job = job_of(row)
    report = {"id": job.id, "tenant": row.tenant, "seq": job.seq, "state": job.state}
    return report | {"operation": job.operation, "cluster_seqs": list(job.cluster), "reason": job.reason}


def check_limit(call: str, limit: int, most: int) -> None:
    """InputError for a page of fewer than 1 or more than `most` records."""
    if not 1 <= limit <= most:
        raise InputError.of(
            call, "limit", f"is {limit}", f"Ask for 1 to {most:,}; `after` gives the next page."
        )


def bad_cursor(call: str, after: str) -> InputError:
    """The error for a cursor that no page has given."""
    return InputError.of(
        call, "after", f"{after!r:.80} is not what a page gave", "Pass on the last page's `after`."
    )
