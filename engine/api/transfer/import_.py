"""Taking in an export: the records of engine/api/transfer/export.py become a tenant of this store.

Ids are hashes of the tenant's name and life, so all get those that they would have here, and whatever names
them follows. Nothing is stored until every record has been checked and every text embedded, by this store's
encoder: vectors that an export may carry can be another one's. Then one commit has it all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import orjson

from undertow.engine.api.report_format import Withheld
from undertow.engine.api.transfer.export import FORMAT, ExportTrailer
from undertow.engine.api.transfer.import_schema import (
    EDITED,
    Content,
    ControlRecord,
    DecisionRecord,
    JobRecord,
    MemoryRecord,
    TurnRecord,
    content_of,
)
from undertow.engine.api.transfer.import_validation import ImportValidator, Versions
from undertow.engine.api.transfer.record_lines import too_large
from undertow.engine.api.transfer.reindex import Encode, embed_rows
from undertow.engine.base.config import Settings
from undertow.engine.base.model import InputError, Memory, MemoryKind, Turn, UndertowError, memory_id
from undertow.engine.base.queries import ImportCommand
from undertow.engine.base.results import ImportReport
from undertow.engine.policies.base import Thresholds
from undertow.engine.readers import parse_messages
from undertow.engine.readers.record import BadField
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import (
    Control,
    LlmJob,
    check_turn,
    control_row,
    job_row,
    memory_of,
    memory_row,
    turn_id,
    turn_row,
)

# between two of these, a shard does other work
RECORDS_PER_STEP = 512
START = "Give what `undertow export` wrote, whole; `undertow ingest` reads logs."


class TenantExists(UndertowError):
    """The tenant that an export is to become has something here already."""

    def __init__(self, tenant: str) -> None:
        super().__init__(tenant)

    def __str__(self) -> str:
        return (
            f"tenant {self.args[0]!r} is here already, if only with deleted turns or a policy. "
            "Import under another name, or erase it first."
        )


class ImportNeedsAdmin(UndertowError):
    """An export sets what only an administrator may set; nothing of it is stored."""


class ImportCancelled(UndertowError):
    """The tenant was erased while an export was being taken in for it; nothing of that is stored."""


class Import:
    """One export on its way to become a tenant.

    `steps` does the work, a slice at a time (InputError: nothing can be imported); then `rows` are the rows.
    `again`: the call is a repeat.
    """

    def __init__(
        self, command: ImportCommand, key: str, generation: int, settings: Settings, encode: Encode
    ) -> None:
        """InputError: the name cannot be a tenant's."""
        check_turn(Turn(command.tenant, (), ""))
        self.tenant, self.again = command.tenant, command.again
        self.key = key
        self.generation = generation
        self.rows: list[Row] = []
        self.steps = self._steps(encode)
        self._records = command.records
        self._as_admin = command.as_admin
        self._settings = settings
        self._checks = ImportValidator()

    @property
    def fingerprint(self) -> str:
        """What tells a repeated import; of records that were not checked yet, what their end claims."""
        last = self._records[-1] if self._records else {}
        return str(last.get("fingerprint")) if isinstance(last, dict) else ""

    @property
    def imported(self) -> ImportReport:
        """The counts, once the steps are done."""
        counts = Counter(row.kind for row in self.rows)
        return ImportReport(counts["turn"], counts["episode"], counts["fact"], counts["decision"])

    @property
    def is_decided(self) -> bool:
        """Whether nothing of the log is left to decide."""
        return self._checks.decided == self._checks.log_len

    def _steps(self, encode: Encode) -> Iterator[None]:
        for line in self._checked():
            if line % RECORDS_PER_STEP == 0:
                yield
        rows: list[Row] = []
        # parsed once more: kept as objects, the records would take many times the memory of their lines
        for line in range(2, len(self._records)):
            rows.append(self._row(line, content_of(self._records[line - 1])))
            rows[-1].lsn = line  # its order, and what an error names
            if len(rows) % RECORDS_PER_STEP == 0:
                yield
        self.rows = self._kept(rows)
        for start in range(0, len(self.rows), RECORDS_PER_STEP):
            yield
            some = self.rows[start : start + RECORDS_PER_STEP]
            embed_rows(some, encode, self._settings.embed_timestamp)

    # ---- reading

    def _checked(self) -> Iterator[int]:
        """The number, from 1, of each record between head and end, once it is checked."""
        records, max_bytes = self._records, self._settings.max_import_bytes
        source = self._ends()
        seal, size = ExportTrailer(), 0
        for line in range(2, len(records)):
            record = records[line - 1]
            with _about(line):
                size += _size(seal, record)
                if size > max_bytes:
                    raise too_large(max_bytes)
                content = content_of(record)
                if content.tenant != source:
                    raise BadField("tenant", f"is not {source!r:.80}, as in the first record", EDITED)
                self._checks.take(content)
                if isinstance(content, ControlRecord) and not self._as_admin:
                    self._check_rights(content)
            yield line
        with _about(len(records)):
            if records[-1] != seal.end(source):
                raise BadField("fingerprint", "is not that of the records: some were lost or changed", EDITED)
            self._checks.finish()

    def _check_rights(self, record: ControlRecord) -> None:
        """ImportNeedsAdmin: it sets what this store does not set by itself."""
        own = Thresholds.of(self._settings).body
        if record.control == "policy" or (record.control == "settings" and record.body != own):
            raise ImportNeedsAdmin(
                f"the export sets {'a policy' if record.control == 'policy' else 'thresholds of its own'}, "
                "which only an administrator may do. Import it with a key that has the scope admin as well."
            )

    def _ends(self) -> str:
        """The tenant that was exported, as the first record says, if the last one is an end."""
        first, last = (self._records[0], self._records[-1]) if self._records else ({}, {})
        with _about(1):
            if not isinstance(first, dict) or first.get("kind") != "export":
                raise BadField("kind", "is not export: the beginning is missing", START)
            if first.get("format") != FORMAT:
                cure = "Use the version of Undertow that wrote it, or a newer one."
                raise BadField("format", f"is {first.get('format')!r:.40}, {FORMAT} can be read", cure)
            if not isinstance(first.get("tenant"), str):
                raise BadField("tenant", "is no name", EDITED)
        with _about(len(self._records)):
            if not isinstance(last, dict) or last.get("kind") != "end":
                raise BadField("kind", "is not end: the export was cut off", "Export it again.")
        return str(first["tenant"])

    # ---- rows

    def _row(self, line: int, content: Content) -> Row:
        with _about(line):
            match content:
                case TurnRecord():
                    return self._turn(line, content)
                case MemoryRecord():
                    return self._memory(content)
                case DecisionRecord():
                    return self._decision(content)
                case ControlRecord():
                    return self._control(content)
                case JobRecord():
                    return self._job(content)

    def _turn(self, line: int, record: TurnRecord) -> Row:
        bound = self._settings.max_message_bytes
        messages = parse_messages(record.messages, source="import", line=line, max_message_bytes=bound)
        turn = Turn(
            self.tenant,
            tuple(messages),
            record.dedupe_key,
            record.session,
            record.timestamp,
            record.metadata,
            arrived=record.timestamp_from is not None,
        )
        return turn_row(self.tenant, self.key, self.generation, record.seq, turn, record.timestamp)

    def _memory(self, record: MemoryRecord) -> Row:
        for field in ("source_seqs", "shown_seqs"):
            self._checks.check_seqs(field, getattr(record, field), record.made_at_seq)
        if {seq for seq, _ in record.source_messages} - set(record.source_seqs):
            raise BadField("source_messages", "names a turn that source_seqs does not", EDITED)
        fields = record.model_dump(exclude={"vector", "superseded_at_seq"})
        fields |= {
            "id": self._renamed("id", record.id, record.kind),
            "tenant": self.tenant,
            "source_seqs": tuple(record.source_seqs),
            "source_messages": tuple((seq, line) for seq, line in record.source_messages),
            "shown_seqs": tuple(record.shown_seqs),
            "supersedes": tuple(self._renamed("supersedes", i, "fact") for i in record.supersedes),
            "links": tuple(self._renamed("links", i, record.kind) for i in record.links),
        }
        if record.episode_id is not None:
            fields["episode_id"] = self._renamed("episode_id", record.episode_id, "episode")
        return memory_row(Memory(**fields), self.key, None)

    def _decision(self, record: DecisionRecord) -> Row:
        for field in ("relevant", "cluster_seqs", "settled", "revived", "salient_seqs"):
            self._checks.check_seqs(field, getattr(record, field), record.seq)
        body = record.model_dump(exclude={"kind", "tenant", "seq"}, exclude_unset=True)
        if record.nearest_episode is not None:
            body["nearest_episode"] = self._renamed("nearest_episode", record.nearest_episode, "episode")
        kinds: tuple[tuple[str, MemoryKind], ...] = (("episode_ids", "episode"), ("fact_ids", "fact"))
        for field, kind in kinds:
            if field in body:
                body[field] = [self._renamed(field, i, kind) for i in body[field]]
        return Row("decision", self.tenant, self.key, record.seq, orjson.dumps(body))

    def _control(self, record: ControlRecord) -> Row:
        body = dict(record.body)
        if "turn_seq" in body:
            body["id"] = self._turn_id(body["turn_seq"])
        if "replaced_by" in body:
            body["replaced_by"] = self._turn_id(record.seq + 1)
        if "memory_id" in body:
            body["memory_id"] = self._renamed("body.memory_id", body["memory_id"], body["kind"])
        named: tuple[tuple[str, MemoryKind], ...] = (("episode_ids", "episode"), ("fact_ids", "fact"))
        for field, kind in named:
            if field in body:
                body[field] = [self._renamed(f"body.{field}", i, kind) for i in body[field]]
        if "job_id" in body:
            body["job_id"] = self._job_id(body["job_id"])
        return control_row(self.tenant, self.key, Control(record.control, record.seq, body))

    def _job(self, record: JobRecord) -> Row:
        self._checks.check_seqs("cluster_seqs", record.cluster_seqs, record.seq)
        identity, cluster = self._job_id(record.id), tuple(record.cluster_seqs)
        job = LlmJob(identity, record.seq, record.state, record.operation, cluster, record.reason)
        return job_row(self.tenant, self.key, job)

    def _turn_id(self, seq: int) -> str:
        return turn_id(self.tenant, self.generation, seq)

    def _job_id(self, old: str) -> str:
        """The id here of a job of the export."""
        number, seq = self._checks.job_places[old]
        return memory_id(self.tenant, self.generation + number - 1, seq, "job", 0)

    def _renamed(self, field: str, old: str, kind: MemoryKind) -> str:
        """The id here of an episode or fact of the export."""
        birth = self._checks.births.get(old)
        if birth is None or birth[1] != kind:
            raise BadField(field, f"names {old:.80}, of which the export has no {kind}", EDITED)
        number, _, born_at_seq, ordinal = birth
        return memory_id(self.tenant, self.generation + number - 1, born_at_seq, kind, ordinal)

    def _kept(self, rows: Sequence[Row]) -> list[Row]:
        """Without words that were deleted while the export was being read."""
        withheld = Withheld([row for row in rows if row.kind in ("control", "episode", "fact")])
        kept = [row for row in rows if row not in withheld]
        versions = Versions(set(self._checks.deletions.values()))
        for row in kept:
            if row.kind in ("episode", "fact"):
                with _about(row.lsn):
                    versions.take(memory_of(row))
        return kept


def note_row(work: Import) -> Row:
    """What tells a repeated call that the import was done."""
    body = {"imported": asdict(work.imported), "fingerprint": work.fingerprint}
    return Row("note", work.tenant, work.key, -1, orjson.dumps(body))


def earlier_import(notes: Iterable[Row], fingerprint: str) -> ImportReport | None:
    """What an import of these records has stored, if one of a tenant's notes tells of it."""
    bodies = [orjson.loads(row.payload) for row in notes]
    done = [body for body in bodies if "imported" in body and body["fingerprint"] == fingerprint]
    return ImportReport(**done[0]["imported"]) if done else None


def _size(seal: ExportTrailer, record: object) -> int:
    """Add a record; its size in bytes, about. BadField."""
    if not isinstance(record, dict):
        raise BadField(None, "is no JSON object", "Write one object a line, as in an export.")
    try:
        return seal.add(record)
    except TypeError as error:
        raise BadField(None, f"is no JSON ({error})", EDITED) from None


@contextmanager
def _about(line: int) -> Iterator[None]:
    """Around what is done with one record: InputError names it."""
    try:
        yield
    except BadField as bad:
        raise InputError(bad.at("import", line)) from None
