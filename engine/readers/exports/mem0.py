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


def mem0(export: Export, raw: Any) -> Iterator[PackedTurn]:
    """A memory, verbatim, as a turn of its own: searchable at once, and recurring like anything said.

    Its own metadata, categories and id stay. A memory that was changed since is a new turn. BadField.
    """
    id = first_name(dict_of(raw), "id")
    tenant = owner(export, raw, "user_id", "agent_id", "run_id")
    text = text_of(raw, "memory") or ""
    at = first_time(raw, "updated_at", "created_at")
    said = export.said(f"{id}\x1f{text}", "user", text, at=at, field="memory")
    metadata = {**dict_of(raw.get("metadata") or {}, "metadata"), "categories": raw.get("categories")}
    yield from export.turns(
        tenant, name_of(raw, "run_id", may_be_empty=True) or "", [said], {**metadata, "id": id}
    )
