"""Parses timestamps in the forms of people and data sets, and normalises them to ISO 8601 text."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime

ACCEPTED = (
    "ISO 8601 ('2023-05-08T13:56:00', with or without a zone), a date alone ('2023-05-08'), "
    "'1:56 pm on 8 May, 2023', '2023/05/20 (Sat) 02:21', or a number of epoch seconds"
)

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# The extended form, and the basic form, whose T distinguishes it from a number.
_ISO = re.compile(
    r"(?:[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?"
    r"|[0-9]{8}T[0-9]{4}(?:[0-9]{2}(?:[.,][0-9]+)?)?)"
    r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_LOCOMO = re.compile(r"([0-9]{1,2}):([0-9]{2}) ?([ap])m on ([0-9]{1,2}) ([a-z]+),? ([0-9]{4})")
_LONGMEMEVAL = re.compile(r"([0-9]{4})/([0-9]{2})/([0-9]{2}) \(([a-z]{3})\) ([0-9]{2}):([0-9]{2})")


def parse_timestamp(value: str | int | float) -> str:
    """`value` as ISO 8601 text that `datetime.fromisoformat` reads back.

    A zone in the input is kept ("Z" becomes "+00:00"); none is added. A date alone stays a date. A number is
    epoch seconds, in UTC. Partial or vague text is not interpreted.

    ValueError, with the accepted forms, for anything else and for times that do not exist.
    """
    try:
        if isinstance(value, str):
            parsed = _from_text(value.strip())
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            parsed = datetime.fromtimestamp(value, UTC).isoformat()
        else:
            parsed = None
    except (ValueError, OverflowError, OSError) as problem:
        raise ValueError(f"{value!r:.80} is no moment in time ({problem}); accepted: {ACCEPTED}") from None
    if parsed is None:
        raise ValueError(f"{value!r:.80} is not a timestamp; accepted: {ACCEPTED}")
    return parsed


def _from_text(text: str) -> str | None:
    """ISO 8601 text; None if no accepted form matches."""
    iso = text.upper()
    if _ISO.fullmatch(iso):
        moment = datetime.fromisoformat(iso)
        if moment.tzinfo is not None and not 1 < moment.year < 9999:
            moment.astimezone(UTC)  # an OverflowError here, not later in a sort
        return moment.isoformat()
    if _DATE.fullmatch(text):
        return date.fromisoformat(text).isoformat()
    lowered = text.lower()
    if match := _LOCOMO.fullmatch(lowered):
        return _locomo(*match.groups())
    if match := _LONGMEMEVAL.fullmatch(lowered):
        return _longmemeval(*match.groups())
    return None


def _locomo(hour: str, minute: str, half: str, day: str, month: str, year: str) -> str:
    if not 1 <= int(hour) <= 12:
        raise ValueError(f"hour {hour} on a 12-hour clock")
    name = month.capitalize()
    if name not in _MONTHS:
        raise ValueError(f"no month is called {month!r}")
    hour_of_day = int(hour) % 12 + (12 if half == "p" else 0)
    return datetime(int(year), _MONTHS.index(name) + 1, int(day), hour_of_day, int(minute)).isoformat()


def _longmemeval(year: str, month: str, day: str, weekday: str, hour: str, minute: str) -> str:
    moment = datetime(int(year), int(month), int(day), int(hour), int(minute))
    if _WEEKDAYS[moment.weekday()] != weekday:
        raise ValueError(f"{moment.date()} is not a {weekday.capitalize()}")
    return moment.isoformat()


def day_in_words(timestamp: str) -> str:
    """Day, month and year of ISO 8601 text as people write them: 8 May 2023."""
    day = datetime.fromisoformat(timestamp)
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def in_words(timestamp: str) -> str:
    """ISO 8601 text as people write it, to the minute, with its own zone: 8 May 2023, 13:56 +02:00."""
    if _DATE.fullmatch(timestamp):
        return day_in_words(timestamp)
    moment = datetime.fromisoformat(timestamp)
    zone = moment.isoformat(timespec="minutes")[len("2023-05-08T13:56") :]
    return f"{day_in_words(timestamp)}, {moment:%H:%M}{zone and ' ' + zone}"
