"""What the commands write: JSON and tables to standard output, everything else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# rich falls back to 80 columns where the output is no terminal
PIPED_WIDTH = 140
UNBOUNDED = 10_000
WIDE = ("text", "earlier_text", "memory", "reason")
WIDE_CHARS = 40
UNBROKEN = ("id", "seq", "tenant", "kind", "decision", "state")
# tables cut longer texts and lists; --json does not
SHOWN_CHARS = 300
SHOWN_ITEMS = 12


def console(*, stderr: bool = False) -> Console:
    """A console on the current standard output or error, without colours off a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def say(text: str) -> None:
    """One line for people, on standard error; never cut or coloured."""
    sys.stderr.write(text + "\n")


def put_text(text: str) -> None:
    sys.stdout.write(text + "\n")


def put_json(document: Mapping[str, Any]) -> None:
    """One JSON document on one line."""
    put_text(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def put_result(document: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """A document, or a sentence that says the same."""
    if as_json:
        put_json(document)
    else:
        put_text(text)


def put_figures(figures: Mapping[str, Any], *, title: str, as_json: bool) -> None:
    """A document, or its names and values one a line."""
    if as_json:
        put_json(figures)
    else:
        put_pairs(figures, title=title)


def put_json_lines(records: Iterable[Mapping[str, Any]]) -> None:
    for record in records:
        put_json(record)


def put_records(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], *, title: str = "", as_json: bool
) -> None:
    """JSON lines, or a table of some columns."""
    if as_json:
        put_json_lines(records)
    else:
        put_table(records, columns, title=title)


def put_table(records: Sequence[Mapping[str, Any]], columns: Sequence[str], *, title: str = "") -> None:
    """Some columns of the records as a table, or as blocks of lines where that is too wide.

    Long texts are cut.
    """
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name in columns:
        numeric = bool(records) and all(isinstance(r.get(name), int | float | None) for r in records)
        wide = name in WIDE
        table.add_column(
            name.replace("_", " "),
            justify="right" if numeric else "left",
            no_wrap=name in UNBROKEN,
            min_width=WIDE_CHARS if wide else None,
            ratio=1 if wide else None,
        )
    for record in records:
        table.add_row(*(_cell(record.get(name)) for name in columns))
    to = console()
    if records and Measurement.get(to, to.options.update(max_width=UNBOUNDED), table).minimum > to.width:
        _put_blocks(records, columns, title, to)
    else:
        to.print(table, markup=False)


def _put_blocks(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str, to: Console
) -> None:
    """The records one below the other: first the short columns, then the texts."""
    if title:
        to.print(Text(title, style="table.title"))
    for record in records:
        shown = {name: cell for name in columns if (cell := _cell(record.get(name)))}
        short = [
            Text.assemble((name.replace("_", " "), "bold"), " ", cell)
            for name, cell in shown.items()
            if name not in WIDE
        ]
        to.print(Text("  ").join(short))
        for name in WIDE:
            if name in shown:
                to.print(Padding(shown[name], (0, 0, 0, 4)), markup=False)


def put_pairs(pairs: Mapping[str, Any], *, title: str = "") -> None:
    """Names and values, one a line."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    if title:  # not the table's own, which breaks a path at the table's width
        console().print(Text(title, style="table.title"), soft_wrap=True)
    for name, value in pairs.items():
        table.add_row(name.replace("_", " "), _cell(value))
    console().print(table, markup=False)


def _cell(value: Any) -> str | Text:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4f}"
        case int():
            return f"{value:,}"
        case list() | tuple():
            shown = ", ".join(map(str, value[:SHOWN_ITEMS]))
            return Text(shown if len(value) <= SHOWN_ITEMS else f"{shown}, ... ({len(value)})")
    text = str(value)
    return Text(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " ...")
