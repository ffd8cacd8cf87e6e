"""Chats of people: WhatsApp's text in its variants, and Slack's folders."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.readers import detect_format, find_logs

from .samples import (
    ANDROID,
    IPHONE,
    LIMIT,
    OWNER,
    read_export,
    slack_files,
    slack_message,
    texts,
    turns,
    warnings,
    write_json,
    write_zip,
)


def write_chat(folder: Path, text: str, name: str = "WhatsApp Chat with Ann.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_an_android_chat(tmp_path: Path) -> None:
    path = write_chat(tmp_path, ANDROID)
    assert detect_format(path) == "whatsapp"
    first, second = turns(path)
    assert first.text == (
        "Ann Example: Shall we sail tomorrow?\nIf the wind is good: yes\nBo: At nine: harbour gate"
    )
    assert (first.tenant, first.session_id, first.timestamp) == (
        "me",
        "WhatsApp Chat with Ann 2024-01-13",
        "2024-01-13T21:59:00",
    )
    assert (second.text, second.timestamp) == ("Cy: I bring bread", "2024-01-14T08:02:00")
    assert warnings(path).endswith("left out: 2 notices, 2 media, deleted messages and notices")


def test_an_iphone_archive_with_american_dates(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "Sailing.zip", {"_chat.txt": IPHONE, "00001-PHOTO.jpg": "binary"})
    assert detect_format(path) == "whatsapp"
    (turn,) = turns(path)
    assert turn.text == (
        "Ann Example: Shall we sail tomorrow?\nIf the wind is good: yes\nBo: At nine: harbour gate"
    )
    assert [m.timestamp for m in turn.messages] == ["2024-01-13T21:59:30", "2024-01-13T22:02:09"]
    assert turn.session_id == "Sailing 2024-01-13"


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("31/12/2023, 08:05 - ", "2023-12-31T08:05:00"),
        ("12/31/23, 8:05 PM - ", "2023-12-31T20:05:00"),
        ("12/31/23, 12:05\u202fam - ", "2023-12-31T00:05:00"),
        ("31/12/23 8:05\u00a0p.\u00a0m. - ", "2023-12-31T20:05:00"),
        ("31.12.23, 08:05 - ", "2023-12-31T08:05:00"),
        ("[31.12.2023 klo 8.05.09] ", "2023-12-31T08:05:09"),
        ("[2023-12-31, 08:05:09] ", "2023-12-31T08:05:09"),
        ("[2023/12/31 下午8:05:09] ", "2023-12-31T20:05:09"),
        ("2023. 12. 31. 오후 8:05 - ", "2023-12-31T20:05:00"),
        ("\u200e[31-12-2023, 08:05:09] ", "2023-12-31T08:05:09"),
    ],
)
def test_dates_of_many_phones(tmp_path: Path, stamp: str, expected: str) -> None:
    path = write_chat(tmp_path, f"{stamp}Ann: hello\n")
    (turn,) = turns(path)
    assert (turn.timestamp, turn.text) == (expected, "Ann: hello")
    assert warnings(path) == ""


@pytest.mark.parametrize(
    ("lines", "first", "warned"),
    [
        ("01/02/24, 10:00 - A: x\n02/01/24, 10:00 - A: y\n", "2024-01-02", False),  # else back in time
        ("01/02/24, 10:00 - A: x\n", "2024-02-01", True),
        ("1/2/24, 10:00 AM - A: x\n", "2024-01-02", True),
    ],
)
def test_days_and_months_are_told_apart_by_the_order_of_dates(
    tmp_path: Path, lines: str, first: str, warned: bool
) -> None:
    path = write_chat(tmp_path, lines)
    assert (turns(path)[0].timestamp or "")[:10] == first
    assert ("do not tell days from months" in warnings(path)) is warned


def test_a_grown_or_cut_chat_adds_what_is_new(tmp_path: Path) -> None:
    old = turns(write_chat(tmp_path, ANDROID))
    more = "15/01/24, 09:00 - Bo: We are back\n15/01/24, 09:00 - Bo: We are back\n"
    cut = "".join(ANDROID.splitlines(keepends=True)[5:])  # newer exports may lack the oldest messages
    path = write_chat(tmp_path, cut + more, "WhatsApp Chat with Ann (1).txt")
    known = {turn.dedupe_key for turn in old}
    assert [t.text for t in turns(path) if t.dedupe_key not in known] == ["Bo: We are back"] * 2
    whole = write_chat(tmp_path, ANDROID + more)
    assert [r.position for r in read_export(whole) if r.turns] == [5, 8, 10]
    assert [t.text for r in read_export(whole, after=8) for t in r.turns] == ["Bo: We are back"] * 2


def test_a_bad_message_is_left_out_alone(tmp_path: Path) -> None:
    lines = [
        "13/01/24, 21:59 - Ann: one",
        f"13/01/24, 21:59 - Ann: {'x' * (LIMIT - 1)}",
        *["y" * 2500] * 5,
        "13/01/24, 25:00 - Bo: late",
        "13/13/24, 20:00 - Bo: never",
        f"14/01/24, 20:00 - {'N' * 2000}: hello",
        "14/01/24, 20:00 - Bo: two\ufffd",
    ]
    found = read_export(write_chat(tmp_path, "\n".join(lines)))
    assert [t.text for r in found for t in r.turns] == ["Ann: one", "Bo: two\ufffd"]
    told = [(e.line, e.field) for r in found for e in r.errors]
    assert told == [(2, "text"), (8, "time"), (9, "date"), (10, "speaker")]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("IMG-20240113-WA0001.jpg (Datei angehängt)\nour boat", "our boat"),
        ("\u200eVID-20240113-WA0001.mp4 (file attached)", None),
        ("\u200e<attached: 00000001-PHOTO.jpg>", None),
        ("our boat \u200e<This message was edited>", "our boat"),
        ("GIF omitted", None),
        ("\u200eYou deleted this message.", None),
        ("see a < b > c", "see a < b > c"),
        (" " * 9_000 + "x", "x"),
    ],
)
def test_what_the_app_writes_is_no_message(tmp_path: Path, text: str, kept: str | None) -> None:
    path = write_chat(tmp_path, f"13/01/24, 21:59 - Ann: {text}\n")
    assert texts(path) == ([f"Ann: {kept}"] if kept else [])
    assert ("left out: 1 media" in warnings(path)) is (kept is None)


def test_other_text_is_no_chat(tmp_path: Path) -> None:
    path = write_chat(tmp_path, "Dear diary,\n13/01/24 was fine\n")
    assert "no line of a WhatsApp chat" in read_export(path)[0].errors[0].reason
    assert "like a message" in read_export(path, format="whatsapp")[0].errors[0].reason


NAMES = st.sampled_from(["Ann Example", "Bo", "+44 20 7946 0000", "Žofie"])
WORDS = st.text(st.sampled_from("ab c:é😀[]()?!\n"), min_size=1).map(str.strip).filter(bool)
TIMES = st.datetimes(datetime(2021, 1, 1), datetime(2029, 12, 31)).map(lambda t: t.replace(microsecond=0))
FORMS = st.sampled_from(["%d/%m/%y, %H:%M - ", "[%m/%d/%Y, %I:%M:%S %p] ", "[%Y-%m-%d, %H:%M:%S] "])


@given(st.lists(st.tuples(TIMES, NAMES, WORDS), max_size=8), FORMS)
def test_a_written_chat_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[datetime, str, str]], form: str
) -> None:
    path = tmp_path_factory.mktemp("chat") / "_chat.txt"
    said = [(datetime(2020, 12, 31, 12), "Ann Example", "begins"), *sorted(said, key=lambda s: s[0])]
    if "%S" not in form:
        said = [(at.replace(second=0), name, text) for at, name, text in said]
    path.write_text("".join(f"{at:{form}}{name}: {text}\n" for at, name, text in said))
    back = [m for turn in turns(path) for m in turn.messages]
    assert [(m.timestamp, m.name, m.content) for m in back] == [(a.isoformat(), n, t) for a, n, t in said]
    assert len({t.dedupe_key for t in turns(path)}) == len(turns(path))


# ---- Slack


def test_a_slack_archive(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "export.zip", slack_files())
    assert detect_format(path) == "slack"
    found = turns(path)
    assert [(t.session_id, t.text) for t in found] == [
        (
            "general 2024-01-05",
            "Ann Example: @bo.example see #boats & the plan (https://x.example)\n"
            "bo.example: [file: plan.pdf]",
        ),
        ("general 2024-01-05", "Ann Example: Who paints?"),
        ("general thread 1704445280.000100", "bo.example: I do"),
        ("general 2024-01-06", "deploys: v2 is out @here"),
    ]
    assert {t.tenant for t in found} == {OWNER}
    assert found[0].timestamp == "2024-01-05T09:01:00.000100+00:00"
    assert found[0].metadata == {"channel": "general", "imported_from": "slack"}
    assert warnings(path).endswith("left out: 1 notices")


def test_an_unpacked_slack_export_is_one_log(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "workspace"
    for name, content in slack_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content)
    for place in (folder, folder.parent):
        (log,) = find_logs([place])
        assert (log.uri, detect_format(log)) == (str(folder), "slack")
    assert turns(folder) == turns(write_zip(tmp_path / "e.zip", slack_files()))


def test_a_grown_workspace_adds_new_messages_and_edited_ones(tmp_path: Path) -> None:
    old, files = turns(write_zip(tmp_path / "a.zip", slack_files())), slack_files()
    day = files["general/2024-01-05.json"]
    day.append(slack_message("1704445300.000100", "U2", "me too", thread_ts="1704445280.000100"))
    files["general/2024-01-06.json"][0] |= {"text": "v3 is out", "edited": {"ts": "1704531700.000000"}}
    files["boats/2024-01-05.json"] = [slack_message("1704445260.000100", "U1", "first")]
    known = {turn.dedupe_key for turn in old}
    new = turns(write_zip(tmp_path / "b.zip", files))
    assert {t.text for t in new if t.dedupe_key not in known} == {
        "Ann Example: first",
        "bo.example: me too",
        "deploys: v3 is out",
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ts": "soon"}, "ts"),
        ({"ts": None}, "ts"),
        ({"ts": "nan"}, "ts"),
        ({"text": 3}, "text"),
        ({"text": "x" * (LIMIT + 1)}, "text"),
        ({"user": None}, "username"),
        ({"files": "plan.pdf"}, "files"),
        ({"thread_ts": 7}, "thread_ts"),
    ],
)
def test_a_bad_message_of_slack_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    files = slack_files()
    files["general/2024-01-06.json"] = [
        slack_message("1704531600.000100", "U1", "good"),
        {**slack_message("1704531601.000100", "U2", "bad"), **change},
    ]
    found = read_export(write_zip(tmp_path / "e.zip", files))
    (error,) = [e for r in found for e in r.errors]
    assert (error.line, error.field) == (2, f"general 2024-01-06[1].{field}")
    assert found[1].turns[0].text == "Ann Example: good"


def test_a_broken_day_does_not_stop_the_others(tmp_path: Path) -> None:
    files = slack_files()
    files["general/2024-01-05.json"] = json.dumps(files["general/2024-01-05.json"])[:-30]
    found = read_export(write_zip(tmp_path / "e.zip", files))
    assert [e.field for r in found for e in r.errors] == ["general 2024-01-05"]
    assert found[1].turns[0].text == "deploys: v2 is out @here"
    assert len(texts(write_zip(tmp_path / "whole.zip", slack_files()))) == 4


def test_a_folder_s_chats_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("WhatsApp Chat with Bo.txt", "Chat de WhatsApp con Ana.txt", "_chat.txt", "notes.txt"):
        (tmp_path / name).write_text(IPHONE)
    found = [Path(log.uri).name for log in find_logs([tmp_path])]
    assert found == ["Chat de WhatsApp con Ana.txt", "WhatsApp Chat with Bo.txt", "_chat.txt"]
