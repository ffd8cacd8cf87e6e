"""Reads memories of mem0 as its `get_all` returns them.

Formats: "Get memories", https://docs.mem0.ai/api-reference/memory/v1-get-memories; "Get memory",
https://docs.mem0.ai/api-reference/memory/get-memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from undertow.engine.base.model import PackedTurn
from undertow.engine.readers.exports.turns import Export, dict_of, first_name, first_time, owner
from undertow.engine.readers.messages import name_of, text_of
from undertow.engine.readers.record import BadField

# Of each field that can name a memory's owner, what the tenant's name begins with; the first one there
# names the tenant. As on mem0's routes (serving/http/routes/mem0/entities.py).
PREFIXES = {"user_id": "", "agent_id": "agent:", "app_id": "app:", "run_id": "run:"}
_OTHERS = tuple(filter(None, PREFIXES.values()))


def mem0(export: Export, raw: Any) -> Iterator[PackedTurn]:
    """A memory, verbatim, as a turn of its own: searchable at once, and recurring like anything said.

    Its own metadata, categories and id stay, and its further owners. A memory that was changed since is a new
    turn. BadField.
    """
    id = first_name(dict_of(raw), "id")
    named = {
        field: prefix + name
        for field, prefix in PREFIXES.items()
        if (name := name_of(raw, field, may_be_empty=True))
    }
    tenant = owner(export, named, *PREFIXES)
    if not export.log.tenant and tenant.startswith(_OTHERS) and tenant == named.get("user_id"):
        raise BadField("user_id", f"{tenant!r:.80} would be the tenant of another here", "Give --tenant.")
    text = text_of(raw, "memory") or ""
    at = first_time(raw, "updated_at", "created_at")
    said = export.said(f"{id}\x1f{text}", "user", text, at=at, field="memory")
    others = {field: raw[field] for field in list(named)[1:]}
    metadata = {
        **dict_of(raw.get("metadata") or {}, "metadata"),
        **others,
        "categories": raw.get("categories"),
    }
    yield from export.turns(
        tenant, name_of(raw, "run_id", may_be_empty=True) or "", [said], {**metadata, "id": id}
    )
