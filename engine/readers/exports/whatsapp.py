"""Reads WhatsApp's exported chats: the text file of Android, the zip archive or `_chat.txt` of an iPhone.

Formats: linuswillner/whatsapp-export-inconsistencies, inconsistencies-messages/ and inconsistencies-media/;
README.md of AbhijeetKrishnan/whatsapp-parser; the descriptions of the packages whats_json and
whatsapp-chat-analyzer ("Parser and analysis for WhatsApp chats").
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, islice
from typing import BinaryIO

from undertow.engine.base.model import BadInput, PackedTurn
from undertow.engine.readers.exports.source import Opener, members
from undertow.engine.readers.exports.turns import Export, Said, owner
from undertow.engine.readers.messages import name_of
from undertow.engine.readers.record import BadField, PackedRecord

_HALF = r"([ap]\.?\s?m\.?|上午|下午|午前|午後|오전|오후)"
_LINE = re.compile(
    r"[\u200e\u200f]*(\[)?([0-9]{1,4})[./-]\s?([0-9]{1,2})[./-]\s?([0-9]{1,4})\.?,?\s(?:klo\s)?"
    rf"(?:{_HALF}\s?)?([0-9]{{1,2}})[:.]([0-9]{{2}})(?:[:.]([0-9]{{2}}))?(?:\s?{_HALF})?"
    r"(?(1)\]|\s[-–])\s(.*)",
    re.DOTALL | re.IGNORECASE,
)
# Where year, month and day stand in a date, the likeliest order first.
_ORDERS = ((2, 1, 0), (2, 0, 1), (0, 1, 2))
_DAY_FIRST, _MONTH_FIRST = _ORDERS[:2]
# The app puts this mark before what it wrote itself.
_BY_APP = "\u200e"
_MEDIUM = re.compile(
    r"<[^<>\n]{1,100}>|(?:image|video|audio|gif|sticker|document|contact card) omitted", re.IGNORECASE
)
_FILE = re.compile(r"[A-Z]{3}-[0-9]{8}-WA[0-9]+\.\w{0,5} \([^()]+\)")
_APP_ENDING = re.compile(r"(?:\u200e<[^<>\n]*>|<This message was edited>)\u200e?$")
_DELETED = ("This message was deleted", "You deleted this message", "null")
_UNKNOWN_NAME = re.compile(r"^~\s?|[\u200e\u200f\u202a-\u202c\u2066-\u2069]")
_LINE_CHARS = 1 << 20
_MOST_MESSAGES = 4_096
_LOOK_AT_LINES = 100


@dataclass
class _Entry:
    """What one line with a date begins. `line`: its number; `end`: that of the last line of its text.

    `is_cut`: the text is longer than a message may be, and not whole.
    """

    line: int
    end: int
    head: re.Match[str]
    text: list[str] = field(default_factory=list)
    is_cut: bool = False


def is_whatsapp(files: Mapping[str, Opener]) -> bool:
    """Whether one of the first lines of the chat begins a message."""
    with _chat(files)() as file:
        return any(_LINE.match(text) for _, text in islice(_lines(file), _LOOK_AT_LINES))


def _chat(files: Mapping[str, Opener]) -> Opener:
    """The text of the chat among its media. FileNotFoundError."""
    names = [name for name in files if len(files) == 1 or name.endswith(".txt")]
    if not names:
        raise FileNotFoundError("the archive holds no text")
    return files[names[0]]


def whatsapp(export: Export) -> Iterator[PackedRecord]:
    """The days of a chat, one record each, at the number of its last line. A bad message is left out alone.

    A session is a day. Every speaker is a user with a name. Times are those of the phone, without zone.
    """
    with members(export.log) as files:
        opened = _chat(files)
        order, is_sure = _date_order(opened)
        if order is None:
            reason = "no line begins like a message of a WhatsApp chat"
            problem = BadInput(str(export.log), None, None, reason, "Export the chat again, as text.")
            yield PackedRecord(export.after, errors=(problem,))
            return
        if not is_sure:
            first = "month" if order == _MONTH_FIRST else "day"
            unsure = f"{export.log}: its dates do not tell days from months; the {first} is taken to be first"
            yield PackedRecord(export.after, warnings=(unsure,))
        entries = (e for e in _entries(opened, export.max_message_bytes) if e.line > export.after)
        for day, group in groupby(entries, key=lambda entry: _day(entry.head, order)):
            repeats: Counter[str] = Counter()
            while some := list(islice(group, _MOST_MESSAGES)):
                yield _record(export, day, some, repeats)


def _lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """The lines with their numbers; one that is very long in pieces."""
    text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="\n")
    number, begins = 0, True
    while piece := text.readline(_LINE_CHARS):
        number += begins
        begins = piece.endswith("\n")
        yield number, piece.rstrip("\r\n")


def _entries(opened: Opener, max_message_bytes: int) -> Iterator[_Entry]:
    """The messages and notices. Text beyond the limit of a message is not held, only refused later."""
    entry, size = None, 0
    with opened() as file:
        for number, text in _lines(file):
            if head := _LINE.match(text):
                if entry is not None:
                    yield entry
                entry, size = _Entry(number, number, head, [head[10]]), 0
            elif entry is not None:
                entry.end, size = number, size + len(text) + 1
                entry.is_cut = size > max_message_bytes
                if not entry.is_cut:
                    entry.text.append(text)
    if entry is not None:
        yield entry


def _day(head: re.Match[str], order: tuple[int, ...]) -> str | None:
    """The date of a line as ISO 8601 text; None if there is no such date."""
    year, month, day = (int(head[2 + place]) for place in order)
    try:
        return datetime(year + 2000 * (year < 100), month, day).date().isoformat()
    except ValueError:
        return None


def _date_order(opened: Opener) -> tuple[tuple[int, ...] | None, bool]:
    """The order in which the most dates exist, then the fewest go back in time; None: no line has a date.

    Also whether day and month could be told apart.
    """
    flaws = {order: [0, 0] for order in _ORDERS}
    last = dict.fromkeys(_ORDERS, "")
    with opened() as file:
        for head in filter(None, (_LINE.match(text) for _, text in _lines(file))):
            for order, found in flaws.items():
                day = _day(head, order)
                found[0] += day is None
                found[1] += day is not None and day < last[order]
                last[order] = day or last[order]
            is_american = "/" in head[0][:6] and bool(head[9])
    if not any(last.values()):
        return None, False
    if flaws[_DAY_FIRST] != flaws[_MONTH_FIRST]:
        return min(_ORDERS, key=lambda order: flaws[order]), True
    likely = (_MONTH_FIRST, _DAY_FIRST) if is_american else (_DAY_FIRST, _MONTH_FIRST)
    best = min((*likely, _ORDERS[2]), key=lambda order: flaws[order])
    return best, best == _ORDERS[2]


def _record(export: Export, day: str | None, entries: list[_Entry], repeats: Counter[str]) -> PackedRecord:
    source, said, errors = str(export.log), [], []
    for entry in entries:
        try:
            found = _said(export, day, entry, repeats)
        except BadField as bad:
            errors.append(bad.at(source, entry.line))
            continue
        said += [found] if found else []
    chat = re.sub(r"( ?\([0-9]+\))?\.(txt|zip)(\.gz)?$", "", export.log.name)
    session = f"{'' if chat == '_chat' else chat} {day}".strip()

    def turns() -> Iterator[PackedTurn]:
        return export.turns(owner(export, {}), session, said, {})

    record = export.record(entries[-1].end, turns)
    return PackedRecord(record.position, record.turns, (*errors, *record.errors))


def _said(export: Export, day: str | None, entry: _Entry, repeats: Counter[str]) -> Said | None:
    at = _time(day, entry.head)
    speaker, colon, first = entry.text[0].partition(": ")
    if not colon:
        export.left_out["notices"] += 1
        return None
    if entry.is_cut:
        reason = f"is longer than {export.max_message_bytes:,} bytes"
        raise BadField("text", reason, "Raise max_message_bytes.")
    lines = [first, *entry.text[1:]]
    if first.startswith(_BY_APP) or _FILE.fullmatch(first):
        lines = lines[1:]  # a notice, or a medium, below which its caption may stand
    text = _APP_ENDING.sub("", "\n".join(lines)).strip()
    if not text or _MEDIUM.fullmatch(text) or text.rstrip(".") in _DELETED:
        export.left_out["media, deleted messages and notices"] += 1
        return None
    name = name_of({"speaker": _UNKNOWN_NAME.sub("", speaker).strip()}, "speaker")
    id = f"{at}\x1f{name}\x1f{text}"
    repeats[id] += 1
    return export.said(f"{id}\x1f{repeats[id]}", "user", text, at=at, name=name, field="text")


def _time(day: str | None, head: re.Match[str]) -> str:
    if day is None:
        raise BadField("date", "does not exist in the order of this file's other dates")
    half = (head[5] or head[9] or "").lower()
    hour = int(head[6])
    if half:
        hour = hour % 12 + 12 * (half[0] == "p" or half in ("下午", "午後", "오후"))
    try:
        return datetime.fromisoformat(f"{day}T{hour:02d}:{head[7]}:{head[8] or '00'}").isoformat()
    except ValueError as problem:
        raise BadField("time", str(problem)) from None
