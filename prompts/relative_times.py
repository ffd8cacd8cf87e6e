"""Works out relative times in what was said: "yesterday" in a line of 8 May 2023 is 7 May 2023.

A small model copies "yesterday" as it stands, or counts wrong. English only; a language without a match costs
nothing and gains nothing.
"""

from __future__ import annotations

import re
from datetime import date, timedelta
from itertools import islice

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_SUNDAY = 6
_NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
_DAYS = {
    "the day before yesterday": -2,
    "yesterday": -1,
    "last night": -1,
    "tomorrow": 1,
    "the day after tomorrow": 2,
}
# months with a capital alone: "what comes next may surprise you"
_AROUND = f"week|weekend|month|year|{'|'.join(_WEEKDAYS)}|(?-i:{'|'.join(_MONTHS)})"
# what stands before it makes another time of it: "half a year ago", "1.5 years ago", "twenty-two days ago"
_ELSE = re.compile(
    rf"(?:[-.,\d]|\b(?:half|and|or|the|over|{'|'.join(_NUMBERS)}|\w+ty|\w+teen)[ -])$", re.IGNORECASE
)
_PHRASE = re.compile(
    rf"\b(?:{'|'.join(sorted(_DAYS, key=len, reverse=True))}"
    rf"|(?P<count>{'|'.join(_NUMBERS)}|\d\d?) (?P<unit>day|week|month|year)s? ago"
    rf"|(?P<side>last|next|this past|this coming) (?P<what>{_AROUND}))\b",
    re.IGNORECASE,
)
_DATE = re.compile(rf"(?P<day>\d\d?) (?P<month>{'|'.join(_MONTHS)}) (?P<year>\d{{4}})")
MOST = 4
"""Relative times worked out in one line."""


def relative_times(text: str, said_on: str | None) -> dict[str, str]:
    """The first `MOST` relative times of a text as they stand there, each with its date in words.

    `said_on`: ISO 8601, or the date in words as in 8 May 2023. Without a date there are none.
    """
    day = _day(said_on or "")
    told: dict[str, str] = {}
    if day is None:
        return told
    for phrase in islice(_PHRASE.finditer(text), MOST):
        if _ELSE.search(text, max(0, phrase.start() - 12), phrase.start()):
            continue
        try:
            told.setdefault(phrase[0], _worked_out(phrase, day))
        except (OverflowError, ValueError):  # before the year 1 or after 9999
            continue
    return told


def _day(text: str) -> date | None:
    in_words = _DATE.match(text)
    try:
        if in_words is not None:
            return date(int(in_words["year"]), 1 + _MONTHS.index(in_words["month"]), int(in_words["day"]))
        return date.fromisoformat(text[:10])
    except ValueError:
        return None


def _worked_out(phrase: re.Match[str], day: date) -> str:
    if phrase["count"]:
        count = phrase["count"].lower()
        return _ago(day, _NUMBERS.get(count) or int(count), phrase["unit"].lower())
    if phrase["side"]:
        return _beside(
            day, -1 if phrase["side"].lower() in ("last", "this past") else 1, phrase["what"].lower()
        )
    return _in_words(day + timedelta(days=_DAYS[phrase[0].lower()]))


def _ago(day: date, count: int, unit: str) -> str:
    if unit == "day":
        return _in_words(day - timedelta(days=count))
    if unit == "week":
        return f"about {_in_words(day - timedelta(weeks=count))}"
    return f"about {_month(day, -count)}" if unit == "month" else str(day.replace(day=1).year - count)


def _beside(day: date, step: int, what: str) -> str:
    """The last (`step` -1) or the next (1) week, month, weekday and so on, as seen from `day`."""
    if what == "week":
        return f"the week {'before' if step < 0 else 'after'} {_in_words(day)}"
    if what == "month":
        return _month(day, step)
    if what == "year":
        return str(day.year + step)
    if what in _WEEKDAYS or what == "weekend":
        wanted = _WEEKDAYS.index("saturday" if what == "weekend" else what)
        apart = (wanted - day.weekday()) * step % 7 or 7
        if what == "weekend" and day.weekday() == _SUNDAY and step < 0:
            apart += 7  # of this weekend, the day before is no last one
        found = _in_words(day + timedelta(days=step * apart))
        return f"the weekend of {found}" if what == "weekend" else found
    month = 1 + _MONTHS.index(what.capitalize())
    is_other_year = month >= day.month if step < 0 else month <= day.month
    return f"{_MONTHS[month - 1]} {day.year + step * is_other_year}"


def _month(day: date, step: int) -> str:
    months = day.year * 12 + day.month - 1 + step
    return f"{_MONTHS[months % 12]} {months // 12}"


def _in_words(day: date) -> str:
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"
