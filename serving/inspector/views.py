"""What the pages show: templates, and what these are given, made of the reports of calls.

Whatever comes from a tenant is escaped by the templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from undertow.engine.base.results import Hit, Report, ScoreParts

STYLE = (files("undertow.serving.inspector") / "style.css").read_bytes()
WORDS = re.compile(r"\s+|\S+")
# Comparing takes up to the product of both lengths.
MOST_COMPARED_WORDS = 2_000
MOST_CHARS = 100_000
MOST_VERSIONS = 20


def page(name: str, **values: Any) -> bytes:
    """A template as HTML in UTF-8."""
    return _templates().get_template(f"{name}.j2").render(values, here=name).encode("utf-8", "replace")


@cache
def _templates() -> Environment:
    loader = PackageLoader("undertow.serving.inspector")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    env.globals |= {"at": at, "bars": bars}
    return env


def at(tenant: str, *parts: str) -> str:
    """The path of a page of a tenant."""
    quoted = (quote(part, safe="").replace(".", "%2E") for part in (tenant, *parts))
    return "/".join(("/inspect/tenants", *quoted))


def timeline(explained: Iterable[Report], turns: Iterable[Report], policy: str) -> list[Report]:
    """Each record of `explain` with its turn, None if that is deleted, and with what `_told` adds."""
    of_seq, counts = {turn["seq"]: turn for turn in turns}, policy == "recmem"
    return [record | _told(record, counts) | {"turn": of_seq.get(record["seq"])} for record in explained]


def _told(record: Report, counts: bool) -> Report:
    """`count`: against theta_count, the turn included; None: it was not counted. `tokens`: of its calls."""
    near, counted = record.get("relevant", ()), counts and record["decision"] in ("waits", "fired")
    made = [(kind, one) for kind in ("episode", "fact") for one in record[f"{kind}_ids"]]
    return {
        "count": len(near) + 1 if counted else None,
        "cosine": max(record.get("relevant_scores", ()), default=None),
        "cluster": record["cluster_seqs"] or sorted(near),
        "made": made,
        "tokens": sum(used[1] + used[3] for used in record.get("usage", {}).values()),
    }


def versions(history: Sequence[Report]) -> list[Report]:
    """The newest versions, newest first, with their words against those of the one before as `pieces`."""
    befores = ["", *(report["text"] for report in history)][-MOST_VERSIONS - 1 :]
    newest = zip(befores, history[-MOST_VERSIONS:], strict=False)
    return [report | {"pieces": difference(before, report["text"])} for before, report in newest][::-1]


def difference(before: str, after: str) -> list[tuple[str, str]]:
    """The words of both texts in order: "same", "gone" or "new". Long ones are cut, and not compared."""
    old, new = WORDS.findall(before[:MOST_CHARS]), WORDS.findall(after[:MOST_CHARS])
    if not old or max(len(old), len(new)) > MOST_COMPARED_WORDS:
        return [("same", "".join(new))]
    pieces: list[tuple[str, str]] = []
    for operation, a, b, c, d in SequenceMatcher(None, old, new).get_opcodes():
        if operation == "equal":
            pieces.append(("same", "".join(new[c:d])))
        else:
            pieces += [("gone", "".join(old[a:b])), ("new", "".join(new[c:d]))]
    return [piece for piece in pieces if piece[1]]


def places(hits: Iterable[Hit]) -> dict[str, int]:
    """The place of each hit, counted from 1, by its id."""
    return {hit.id: n for n, hit in enumerate(hits, 1)}


def bars(score: float, parts: ScoreParts) -> list[tuple[str, float]]:
    """A score and its parts by name. What the turns around it add, to cosine and words, is one part."""
    lift = 0.3 * max((parts.neighbour_cosine or 0.0) - parts.cosine, 0.0)
    around = lift + parts.neighbour_words + parts.stretch_words
    return [("cosine", parts.cosine), ("words", parts.words), ("neighbours", around), ("score", score)]
