"""What the tests of `undertow eval` share: small benchmark files of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.json_lines import key_of
from undertow.bench.quality.systems.base import Means
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder

BY = "Ben"


def said(n: int, speaker: str, text: str, **more: Any) -> dict[str, Any]:
    return {"dia_id": f"D1:{n}", "speaker": speaker, "text": text, **more}


def talk(texts: Iterable[str], *speakers: str) -> dict[str, Any]:
    """One session of these messages, by the speakers in turns."""
    by = cycle(speakers or ("Ann",))
    messages = [said(n, speaker, text) for n, (text, speaker) in enumerate(zip(texts, by, strict=False), 1)]
    return {"session_1_date_time": "1:56 pm on 8 May, 2023", "session_1": messages}


def question(text: str, category: int, *evidence: str) -> dict[str, Any]:
    return {"question": text, "category": category, "evidence": list(evidence), "answer": "made up"}


def conversation(**changes: Any) -> dict[str, Any]:
    """A made-up sample in LoCoMo's form: five messages, so three turns, and a second session of one."""
    talk = {
        "speaker_a": "Ann",
        "speaker_b": BY,
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [
            said(1, "Ann", "I signed up for the pottery course."),
            said(2, BY, "My brother sells canoes."),
            said(3, "Ann", "The kiln broke yesterday."),
            said(4, BY, "Saturdays are for chess."),
            said(5, "Ann", "Bye."),
        ],
        "session_2_date_time": "9:00 am on 12 May, 2023",
        "session_2": [{**said(1, BY, "Look at this."), "dia_id": "D2:1", "blip_caption": "a red lighthouse"}],
    }
    asked = [
        question("Which course did Ann sign up for, the pottery course?", 4, "D1:1"),
        question("What do canoes, chess and the lighthouse have in common?", 1, "D1:2; D1:4", "D2:1,D1:2"),
        question("Who sells kilns?", 5, "D1:3"),
        question("Nothing was noted for this one?", 2),
        question("Where is the zeppelin?", 3, "D9:9"),
    ]
    return {"sample_id": "made-up", "conversation": talk, "qa": asked, **changes}


def written(folder: Path, *samples: Any, name: str = "locomo.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(samples))
    return path


def haystack(question_id: str = "q1", **changes: Any) -> dict[str, Any]:
    return {
        "question_id": question_id,
        "question_type": "single-session-user",
        "question": "Where did I moor the dinghy?",
        "question_date": "2023/05/30 (Tue) 23:40",
        "answer": "In the estuary",
        "answer_session_ids": ["s2"],
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/21 (Sun) 10:00"],
        "haystack_session_ids": ["s1", "s2"],
        "haystack_sessions": [
            [{"role": "user", "content": "I like tea."}, {"role": "assistant", "content": "Noted."}],
            [
                {"role": "user", "content": "I moored the dinghy in the estuary."},
                {"role": "assistant", "content": "Safe there."},
                {"role": "user", "content": "I hope so."},
            ],
        ],
        **changes,
    }


def only(path: Path, benchmark: Any = "locomo") -> Sample:
    (sample,) = load(path, benchmark, 1000)
    return sample


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def kept_lines(file: Path) -> list[dict[str, Any]]:
    """The answers or verdicts of a file by run and question, in whatever order they came."""
    latest = {key_of(line): line for line in lines_of(file)}
    return [latest[key] for key in sorted(latest)]


def means(folder: Path, benchmark: Benchmark = "locomo", **settings: Any) -> Means:
    """What a measured system is made with: the hashing encoder, and a folder of its own."""
    encoder = cache(lambda: KeptVectors(HashingEncoder(384)))
    return Means(benchmark, Settings(**{"encoder": "hash:384", **settings}), folder, encoder)
