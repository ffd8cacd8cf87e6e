"""Reads items of a LangGraph store, as `Item.dict()` and the server's search return them.

Formats: "Item", https://reference.langchain.com/python/langgraph.store/base/Item; "SearchItemsResponse",
https://reference.langchain.com/python/langgraph-sdk/schema/SearchItemsResponse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from undertow.engine.base.model import PackedTurn
from undertow.engine.readers.exports.turns import Export, dict_of, first_name, first_time, owner
from undertow.engine.readers.record import BadField

# Where applications keep the text of a memory.
_TEXTS = ("content", "text", "memory", "data")


def langgraph(export: Export, raw: Any) -> Iterator[PackedTurn]:
    """An item's text as a turn of its own; where its value has none, the value as JSON. BadField.

    The tenant is the namespace, joined by slashes. An item that was changed since is a new turn.
    """
    key = first_name(dict_of(raw), "key")
    namespace = raw.get("namespace")
    if not isinstance(namespace, list) or not all(isinstance(part, str) for part in namespace):
        raise BadField("namespace", "is missing or not a list of names")
    path = "/".join(namespace)
    tenant = owner(export, {"namespace": path}, "namespace")
    text = _text(dict_of(raw.get("value"), "value"))
    at = first_time(raw, "updated_at", "created_at")
    said = export.said(f"{path}\x1f{key}\x1f{text}", "user", text, at=at, field="value")
    yield from export.turns(tenant, "", [said], {"namespace": path, "id": key})


def _text(value: dict[str, Any]) -> str:
    for name in _TEXTS:
        inner = value.get(name)
        if isinstance(inner, dict) and isinstance(inner.get(name), str):
            inner = inner[name]
        if isinstance(inner, str) and inner.strip():
            return inner
    try:
        return orjson.dumps(value).decode()
    except TypeError as problem:
        raise BadField("value", f"cannot be written as JSON ({problem})") from None
