"""Prompts tell the dates of relative times."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.prompts.builders import ShownMemory, Style, answer_prompt
from undertow.prompts.relative_times import MOST, relative_times

MONDAY = "2023-05-08T13:56"


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ("Yesterday I ran", {"Yesterday": "7 May 2023"}),
        ("the day before yesterday", {"the day before yesterday": "6 May 2023"}),
        ("We saw it last night", {"last night": "7 May 2023"}),
        ("I fly tomorrow", {"tomorrow": "9 May 2023"}),
        ("10 days ago", {"10 days ago": "28 April 2023"}),
        ("two weeks ago", {"two weeks ago": "about 24 April 2023"}),
        ("five months ago", {"five months ago": "about December 2022"}),
        ("a year ago", {"a year ago": "2022"}),
        ("last week", {"last week": "the week before 8 May 2023"}),
        ("next month", {"next month": "June 2023"}),
        ("last Monday", {"last Monday": "1 May 2023"}),
        ("next monday", {"next monday": "15 May 2023"}),
        ("this past Saturday", {"this past Saturday": "6 May 2023"}),
        ("next weekend", {"next weekend": "the weekend of 13 May 2023"}),
        ("last May", {"last May": "May 2022"}),
        ("last April", {"last April": "April 2023"}),
        ("next June", {"next June": "June 2023"}),
        ("what comes next may surprise you", {}),
        ("yesterdays", {}),
        ("half a year ago", {}),
        ("1.5 years ago", {}),
        ("twenty-two days ago", {}),
        ("thirty one days ago", {}),
        ("a year and two months ago", {}),
        ("the next month he left", {}),
        ("over the last month", {}),
        ("two or three years ago", {}),
        ("a month ago", {"a month ago": "about April 2023"}),
        ("Today, this week, soon, some years ago", {}),
    ],
)
def test_relative_times_are_worked_out_from_the_date_of_the_line(said: str, times: dict[str, str]) -> None:
    assert relative_times(said, MONDAY) == relative_times(said, "8 May 2023, 13:56") == times


def test_on_a_sunday_the_last_weekend_is_the_one_before() -> None:
    assert relative_times("last weekend", "2023-05-07") == {"last weekend": "the weekend of 29 April 2023"}
    assert relative_times("last weekend", "2023-05-06") == {"last weekend": "the weekend of 29 April 2023"}
    assert relative_times("next weekend", "2023-05-07") == {"next weekend": "the weekend of 13 May 2023"}


@given(st.text(), st.text())
def test_any_text_and_any_date_are_taken(text: str, said_on: str) -> None:
    assert len(relative_times(f"{text} yesterday {text} 99 years ago", said_on)) <= MOST


def test_there_are_none_without_a_date_or_before_the_calendar() -> None:
    assert relative_times("yesterday", None) == relative_times("yesterday", "undated") == {}
    assert relative_times("yesterday, 3 days ago", "0001-01-01") == {}
    assert len(relative_times("yesterday, tomorrow, last week, next week, last year", MONDAY)) == MOST


def test_answering_prompts_tell_them_beside_the_words_and_the_papers_form_does_not() -> None:
    memory, plain = (
        ShownMemory(1, "8 May 2023, 13:56", "Ann: I ran yesterday."),
        ShownMemory(2, None, "Bea: Hi."),
    )
    counts: dict[Style, int] = {"notes": 2, "short": 2, "paper": 0}
    for style, count in counts.items():
        asked = answer_prompt("When?", [memory], [memory], [memory, plain], None, style=style).user
        assert asked.count("7 May 2023") == count, "an episode has several dates"
    lines = answer_prompt("When?", [], [], [memory, plain], None).user.split("Turns:\n")[1].splitlines()[:2]
    assert json.loads(lines[0]) == [1, memory.date, memory.text, {"yesterday": "7 May 2023"}]
    assert json.loads(lines[1]) == [2, "undated", plain.text]
