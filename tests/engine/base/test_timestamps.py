"""What a timestamp may look like, and that nothing is guessed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.base.model import time_key
from undertow.engine.base.timestamps import ACCEPTED, in_words, parse_timestamp


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        ("2023-05-08T13:56:00", "2023-05-08T13:56:00"),
        (" 2023-05-08 13:56 ", "2023-05-08T13:56:00"),
        ("2023-05-08t13:56:00z", "2023-05-08T13:56:00+00:00"),
        ("2023-05-08T13:56:00.25+02:00", "2023-05-08T13:56:00.250000+02:00"),
        ("2023-05-08T13:56:00-0330", "2023-05-08T13:56:00-03:30"),
        ("20230508T135600Z", "2023-05-08T13:56:00+00:00"),
        ("2023-05-08", "2023-05-08"),
        ("1:56 pm on 8 May, 2023", "2023-05-08T13:56:00"),
        ("12:09 am on 13 September, 2023", "2023-09-13T00:09:00"),
        ("12:30 pm on 1 January, 2022", "2022-01-01T12:30:00"),
        ("2023/05/20 (Sat) 02:21", "2023-05-20T02:21:00"),
        (0, "1970-01-01T00:00:00+00:00"),
        (1683554160, "2023-05-08T13:56:00+00:00"),
        (1683554160.5, "2023-05-08T13:56:00.500000+00:00"),
    ],
)
def test_accepted_forms(given_value: str | float, expected: str) -> None:
    assert parse_timestamp(given_value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("", "yesterday", "12", "2023", "20230508", "1683554160", "May 2023", "8 May", "13:56"),
        *("2023-02-30", "2023-13-01T00:00:00", "2023-05-08T25:00:00", "2023-05-08x13:56:00"),
        *("13:56 pm on 8 May, 2023", "1:56 pm on 31 June, 2023", "1:56 pm on 8 Mai, 2023"),
        *("2023/05/20 (Sun) 02:21", "2023/02/30 (Thu) 02:21", "05/08/2023", "２０２３-05-08"),
        *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-10:00"),
        *(1683554160000, float("nan"), float("inf"), 10**400),
    ],
)
def test_refused_with_what_is_accepted(value: str | float) -> None:
    with pytest.raises(ValueError, match="accepted") as caught:
        parse_timestamp(value)
    assert ACCEPTED in str(caught.value)


@pytest.mark.parametrize("value", [True, None, ["2023-05-08"], {}])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a timestamp"):
        parse_timestamp(value)  # type: ignore[arg-type]


@given(st.datetimes(), st.sampled_from(["", "Z", "+05:30", "-08:00"]))
def test_iso_text_keeps_its_moment_and_only_its_own_zone(moment: datetime, zone: str) -> None:
    try:
        parsed = parse_timestamp(moment.isoformat() + zone)
    except ValueError:
        assert moment.year in (1, 9999)  # no such moment in UTC
        return
    expected = datetime.fromisoformat(moment.isoformat() + zone)
    assert datetime.fromisoformat(parsed) == expected
    assert (datetime.fromisoformat(parsed).tzinfo is None) == (zone == "")
    assert parse_timestamp(parsed) == parsed


@given(st.integers(min_value=-(10**9), max_value=10**10))
def test_numbers_are_epoch_seconds(seconds: int) -> None:
    assert datetime.fromisoformat(parse_timestamp(seconds)) == datetime.fromtimestamp(seconds, UTC)


@given(st.one_of(st.text(max_size=30), st.floats(), st.integers()))
def test_anything_else_is_a_value_error_and_what_passes_can_be_sorted(value: str | float) -> None:
    try:
        parsed = parse_timestamp(value)
    except ValueError:
        return
    assert time_key(parsed).tzinfo is None


@pytest.mark.parametrize(
    ("timestamp", "words"),
    [
        ("2023-05-08", "8 May 2023"),
        ("2023-05-08T13:56:00", "8 May 2023, 13:56"),
        ("2023-12-31T00:00:09.250000+00:00", "31 December 2023, 00:00 +00:00"),
        ("2023-02-01T23:05:00-03:30", "1 February 2023, 23:05 -03:30"),
    ],
)
def test_stored_timestamps_in_words(timestamp: str, words: str) -> None:
    assert parse_timestamp(timestamp) == timestamp, "this is how they are stored"
    assert in_words(timestamp) == words
