"""Memory for LangGraph: a BaseStore whose items are turns (langgraph-checkpoint 4.3)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice, takewhile
from typing import Any
from urllib.parse import quote, unquote

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    get_text_at_path,
)

from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.results import Report
from undertow.serving.adapters.memories import Memories, absence, tenant_name
from undertow.serving.client import Client

Namespace = tuple[str, ...]
FILTERABLE = "Give text, a number, true or false, an object of operators, or an object of these."


class UndertowStore(BaseStore):
    """Each item is one turn of the tenant PREFIX/ROOT, percent-encoded.

    ROOT: the first `depth` elements of its namespace. The turn's metadata have the item. A put adds the new
    turn, then deletes the former one: whoever reads meanwhile finds the new one, or both in a search.
    Errors are kinds of UndertowError, except ValueError for what cannot be stored or asked for.
    """

    def __init__(
        self,
        served: MemoryApi | Client,
        *,
        prefix: str = "langgraph",
        depth: int = 1,
        fields: Sequence[str] = ("$",),
    ) -> None:
        """`served`: a router, InProcess or a Client, which stay open.

        `fields`: the paths of a value that a query looks at; "$": all of it, as JSON.
        """
        self._memories = Memories(served)
        self._prefix = prefix
        self._depth = depth
        self._fields = fields
        self._putting = threading.Lock()

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """The results in order. Reads come before puts; of several puts of one item the last one counts."""
        asked = list(ops)
        puts = {(op.namespace, op.key): op for op in asked if isinstance(op, PutOp)}
        made = [(op, None if op.value is None else self._turn(op)) for op in puts.values()]
        results = [self._read(op) for op in asked]
        for op, turn in made:
            with self._putting:
                self._put(op, turn)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As `batch`, on a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    def _read(self, op: Op) -> Result:
        match op:
            case GetOp():
                versions = list(self._versions(op.namespace, op.key))
                return Item(**_item(versions[-1])) if versions else None
            case SearchOp():
                return self._search(op)
            case ListNamespacesOp():
                return self._namespaces(op)
            case PutOp():
                return None
        raise ValueError(f"{type(op).__name__} is no operation of a store here.")

    def _turn(self, op: PutOp) -> tuple[str, dict[str, Any]]:
        """The text to search and the metadata of an item. ValueError: it is no JSON, or is to expire."""
        if op.ttl is not None:
            raise ValueError(f"{op.key!r} has a ttl. Items do not expire here: delete them.")
        try:
            text = json.dumps(op.value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the value of {op.key!r} is no JSON: {error}") from error
        value = json.loads(text)
        paths = () if op.index is False else op.index or self._fields
        words = "\n".join(found for path in paths for found in get_text_at_path(value, path)).strip()
        item = {"namespace": _path(op.namespace), "key": op.key, "item": text}
        return words or op.key or text, {**item, **dict(_leaves("value", value))}

    def _put(self, op: PutOp, turn: tuple[str, dict[str, Any]] | None) -> None:
        former = list(self._versions(op.namespace, op.key))
        if turn is not None:
            words, metadata = turn
            now = datetime.now(UTC).isoformat()
            created = former[0]["metadata"]["created_at"] if former else now
            self._memories.add(
                self._tenant(op.namespace),
                [{"role": "user", "content": words}],
                timestamp=now,
                metadata={**metadata, "created_at": created, "updated_at": now},
            )
        for report in former:
            with absence():
                self._memories.delete(self._tenant(op.namespace), report["id"])

    def _versions(self, namespace: Namespace, key: str) -> Iterator[Report]:
        """The turns of an item, oldest first: one, or more while it is put."""
        where = {"namespace": {"$eq": _path(namespace)}, "key": {"$eq": key}}
        return self._memories.turns(self._tenant(namespace), where)

    def _search(self, op: SearchOp) -> list[SearchItem]:
        if op.limit < 0 or op.offset < 0:
            raise ValueError(f"limit is {op.limit} and offset {op.offset}. Give 0 or more.")
        if op.limit == 0:
            return []
        where = {"namespace": {"$prefix": _path(op.namespace_prefix)}, **dict(_filters(op.filter or {}))}
        tenants, end = self._tenants(op.namespace_prefix), op.offset + op.limit
        if not (op.query and op.query.strip()):
            turns = chain.from_iterable(self._memories.turns(tenant, where) for tenant in tenants)
            return [SearchItem(**_item(turn)) for turn in islice(turns, op.offset, end)]
        hits = [
            (hit, tenant)
            for tenant in tenants
            for hit in self._memories.search(tenant, op.query, end, kinds=["turn"], where=where)
        ]
        found = []
        for hit, tenant in sorted(hits, key=lambda one: -one[0].score)[op.offset : end]:
            with absence():
                turn = self._memories.get(tenant, hit.id)
                found.append(SearchItem(**_item(turn), score=hit.score))
        return found

    def _namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        known = [tuple(takewhile(lambda part: part != "*", c.path)) for c in conditions if _is_prefix(c)]
        under = max(known, key=len, default=())
        where = {"namespace": {"$prefix": _path(under)}}
        spaces = {
            _parts(turn["metadata"]["namespace"])
            for tenant in self._tenants(under)
            for turn in self._memories.turns(tenant, where)
        }
        matching = [space for space in spaces if all(_matches(c, space) for c in conditions)]
        shown = sorted({space[: op.max_depth] for space in matching})
        return shown[op.offset : op.offset + op.limit]

    def _tenant(self, namespace: Namespace) -> str:
        return tenant_name(self._prefix, *namespace[: self._depth])

    def _tenants(self, under: Namespace) -> list[str]:
        """The tenants of all namespaces that begin so."""
        base = self._tenant(under)
        if len(under) >= self._depth:
            return [base]
        names = self._memories.tenants(base)
        return [name for name in names if name == base or name.startswith(f"{base}/")]


def _path(namespace: Namespace) -> str:
    """A namespace as text, so that the path of another begins with it only if the other is below it."""
    return "".join(f"{quote(part, safe='')}/" for part in namespace)


def _parts(path: str) -> Namespace:
    return tuple(map(unquote, path.split("/")[:-1]))


def _item(turn: Report) -> dict[str, Any]:
    stored = turn["metadata"]
    times = {name: datetime.fromisoformat(stored[name]) for name in ("created_at", "updated_at")}
    place = {"namespace": _parts(stored["namespace"]), "key": stored["key"]}
    return {**place, "value": json.loads(stored["item"]), **times}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a filter can look at: the texts, numbers, trues and falses of a value, by their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}/{quote(key, safe='')}", inner)
    elif isinstance(value, str | int | float | bool):
        yield path, value


def _filters(wanted: Any, path: str = "value") -> Iterator[tuple[str, Any]]:
    """LangGraph's filter as ours. ValueError names the field."""
    if isinstance(wanted, Mapping) and wanted:
        if any(str(key).startswith("$") for key in wanted):
            yield path, dict(wanted)
            return
        for key, inner in wanted.items():
            yield from _filters(inner, f"{path}/{quote(key, safe='')}")
    elif isinstance(wanted, str | int | float | bool):
        yield path, {"$eq": wanted}
    elif path != "value":
        raise ValueError(f"filter: {path!r} is {wanted!r:.80}. {FILTERABLE}")


def _is_prefix(condition: MatchCondition) -> bool:
    if condition.match_type not in ("prefix", "suffix"):
        raise ValueError(f"match_type is {condition.match_type!r}. Give prefix or suffix.")
    return condition.match_type == "prefix"


def _matches(condition: MatchCondition, namespace: Namespace) -> bool:
    length = len(condition.path)
    end = namespace[:length] if _is_prefix(condition) else namespace[-length:] if length else ()
    return len(end) == length and all(
        wanted in ("*", part) for wanted, part in zip(condition.path, end, strict=True)
    )
