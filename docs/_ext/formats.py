"""What reference/formats says: the contents of each file, from the classes that read and write it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import pyarrow as pa
from pydantic import TypeAdapter

from undertow.engine.api.transfer import export, import_schema
from undertow.engine.api.transfer.arrow import SCHEMAS
from undertow.engine.cluster import shard_map
from undertow.engine.storage import journal_rows, store_info
from undertow.serving.auth import audit, key_file
from undertow.serving.http import state_db

FIELDS, COLUMNS = "field | type | default", "column | type"


class Section(NamedTuple):
    """A heading, words below it, and a table: its head and its rows."""

    title: str
    words: str
    head: str = FIELDS
    rows: Sequence[tuple[str, ...]] = ()


def formats() -> Iterator[Section]:
    yield Section(
        "## Logs", "[Bulk ingest](../importing.md#the-messages-format) describes the files that you can load."
    )
    yield from of_a_store()
    yield from of_an_export()
    yield from of_a_cluster_and_a_service()


def of_a_store() -> Iterator[Section]:
    readable = ", ".join(map(str, store_info.READABLE_VERSIONS))
    words = (
        f"Version {store_info.FORMAT_VERSION}; versions {readable} can be read. "
        "[Versions](../versions.md#files) says which program reads which version."
    )
    name = f"`{store_info.DESCRIPTION}`"
    yield Section(f"## Store: {name}", words, FIELDS, fields(store_info.StoreInfo))
    kinds = ", ".join(f"`{kind}`" for kind in get_args(journal_rows.Kind))
    words = (
        f"The rows of the Lance dataset that {name} names. `kind` is one of {kinds}. `payload` is JSON, and "
        "`vector` is fp16, little-endian ([decision 2](../decisions/0002-vectors-as-bytes.md))."
    )
    yield Section("## Journal", words, COLUMNS, columns(journal_rows.SCHEMA))


def of_an_export() -> Iterator[Section]:
    first, last = json.dumps(export.head("TENANT")), export.ExportTrailer().end("TENANT")
    words = (
        f"A JSON object a line. The first line is `{first}`. The last one has the fields "
        f"{', '.join(f'`{name}`' for name in last)}. [Operate](../operations.md#one-tenant) has the commands."
    )
    yield Section("## Export", words)
    for record in get_args(import_schema.Content):
        name = record.__name__.removesuffix("Record").lower()
        yield Section(f"### `{name}`", record.__doc__ or "", FIELDS, fields(record))
    words = (
        "In Parquet and in Arrow, over Flight too ([tables](../arrow.md)). A turn may also have its vector."
    )
    yield Section("## Tables", words)
    for name, schema in SCHEMAS.items():
        yield Section(f"### {name}", "", COLUMNS, columns(schema))


def of_a_cluster_and_a_service() -> Iterator[Section]:
    phases = (inspect.getdoc(shard_map.ShardMap) or "").partition("\n\n")[2].replace("\n*", "\n\n*")
    words = f"One file a version. [Cluster](../cluster.md#what-is-where) says where it is. {phases}"
    title = f"## Shard map: `{shard_map.FOLDER}/NUMBER.json`"
    yield Section(title, words, FIELDS, fields(shard_map.ShardMap))
    words = (
        f"Version {key_file.FORMAT_VERSION}: an object with `format_version` and `keys`, a list. It has no "
        "secrets. [The service](../service.md#keys) has the commands."
    )
    yield Section(f"## Keys: `{key_file.FILE_NAME}`", words, FIELDS, fields(key_file.Key))
    words = (
        f"A JSON object a line, of at most {audit.LINE_BYTES:,} bytes: `at`, `outcome`, `counts`, and these. "
        "You may move the file away at any time; the service then begins a new one."
    )
    forms = [(f"`{name}`", f"`{form.pattern}`") for name, form in audit.FORMS.items()]
    yield Section(f"## Audit log: `{audit.FILE_NAME}`", words, "field | form", forms)
    words = f"Version {state_db.VERSION}, SQLite. It names tenants by the store's keyed hash."
    sql = f"```sql{state_db.SCHEMA}```"
    yield Section(f"## State of the service: `{state_db.FILE_NAME}`", f"{words}\n\n{sql}")


def columns(schema: pa.Schema) -> list[tuple[str, ...]]:
    return [(f"`{one.name}`", f"`{one.type}`") for one in schema]


def fields(of: Any) -> list[tuple[str, ...]]:
    """The name, the type and the default of each field of a class."""
    schema = TypeAdapter(of).json_schema()
    needed, named = schema.get("required", ()), schema.get("$defs", {})
    rows = []
    for name, one in schema["properties"].items():
        default = one.get("default")
        plain = isinstance(default, int | float | str) and default != ""
        shown = "required" if name in needed else f"`{default}`" if plain else ""
        rows.append((f"`{name}`", typed(one, named), shown))
    return rows


def typed(schema: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """A schema in words. A shape that has a name is told by its own fields."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return typed(named[name], named)
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(typed(one, named) for one in either))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {typed(schema.get('items', {}), named)}"
    if inner := schema.get("properties"):
        return f"object: {', '.join(f'`{name}` ({typed(one, named)})' for name, one in inner.items())}"
    return str(schema.get("format") or schema.get("type", "anything"))
