"""mem0's users, agents, apps and runs as tenants, its filters as ours, and ids that carry their tenant."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from undertow.serving.auth.principal import check_name
from undertow.serving.http.problems import Problem, bad_field

# the first one of a request is its tenant
ENTITIES = ("user_id", "agent_id", "app_id", "run_id")
PREFIXES = {"agent:": "agent_id", "app:": "app_id", "run:": "run_id"}
NO_ENTITY = "is missing. Name whose memories: user_id, agent_id, app_id or run_id."
OPERATORS = {"eq", "ne", "gt", "gte", "lt", "lte", "in"}
NO_ID = "This is no id of a memory here. Take the ids that add, search and get_all return."


def tenant_of(entity: str, name: Any) -> str:
    """The tenant of one entity, such as `user_id`. Problem 422."""
    if not isinstance(name, str) or not name:
        raise bad_field(entity, "must be text that is not empty.")
    if name == "*":
        raise bad_field(entity, "the wildcard * is not supported. Name one, and ask again for the next.")
    if name in (".", ".."):
        raise bad_field(
            entity, f"must not be {name}, which HTTP clients take out of a path. Name it otherwise."
        )
    if entity != "user_id":
        return f"{entity.removesuffix('_id')}:{name}"
    for prefix, other in PREFIXES.items():
        if name.startswith(prefix) and name != prefix:
            raise bad_field(entity, f"begins with {prefix}, as tenants of others do here. Give {other}.")
    return name


def entity_of(tenant: str) -> tuple[str, str]:
    """The type of the entity that a tenant is, such as `user`, and its name."""
    kind, colon, name = tenant.partition(":")
    return (kind, name) if kind + colon in PREFIXES and name else ("user", tenant)


def opaque(tenant: str, memory_id: str) -> str:
    """The id of a memory as mem0's client gets it."""
    return f"{urlsafe_b64encode(tenant.encode()).decode().rstrip('=')}.{memory_id}"


def parted(text: Any) -> tuple[str, str]:
    """The tenant and our id of a memory. Problem 404: there is no such id."""
    head, _, memory_id = text.partition(".") if isinstance(text, str) else ("", "", "")
    try:
        tenant = urlsafe_b64decode(head + "=" * (-len(head) % 4)).decode()
        check_name(tenant)
        check_name(memory_id)
    except ValueError:
        raise Problem(404, "unknown-memory", NO_ID) from None
    if opaque(tenant, memory_id) != text:  # decoding passes over other characters
        raise Problem(404, "unknown-memory", NO_ID)
    return tenant, memory_id


@dataclass
class Selection:
    """What filters select: `entities` by name, and `metadata`; a value, or a list of accepted ones, each."""

    entities: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *filters: Any) -> Selection:
        """What all of them select. Problem 422: they hold what is not supported."""
        selection = cls()
        for into, key, value in (condition for each in filters for condition in _conditions(each)):
            chosen: dict[str, Any] = getattr(selection, into)
            if chosen.setdefault(key, value) != value:
                raise bad_field(f"filters.{key}", "is given twice, with different values. Give it once.")
        return selection

    def resolved(self, field: str = "filters.user_id") -> tuple[str, dict[str, Any]]:
        """The tenant, and the metadata of its turns that are meant. Problem 422.

        `field`: where an entity is to be named.
        """
        given = [name for name in ENTITIES if self.entities.get(name) is not None]
        if not given:
            raise bad_field(field, NO_ENTITY)
        first, *others = given
        name = self.entities[first]
        if isinstance(name, list):
            if len(name) != 1:
                raise bad_field(f"filters.{first}", "must name one. Ask for one at a time.")
            (name,) = name
        tenant = tenant_of(first, name)
        where = dict(self.metadata)
        for other in others:
            value = self.entities[other]
            for one in value if isinstance(value, list) else [value]:
                tenant_of(other, one)
            if where.setdefault(other, value) != value:
                raise bad_field(f"metadata.{other}", f"differs from {other}. Give one of both.")
        return tenant, where


def _conditions(filters: Any) -> Iterator[tuple[str, str, Any]]:
    """The kind, the key and the accepted values of each condition."""
    if not isinstance(filters, Mapping):
        raise bad_field("filters", "must be an object, such as {'user_id': 'ann'}.")
    parts = filters.get("AND", [])
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise bad_field("filters.AND", "must be a list of objects.")
    for part in [{key: value for key, value in filters.items() if key != "AND"}, *parts]:
        for key, value in part.items():
            if key in ENTITIES:
                yield "entities", key, _accepted(key, value)
            elif key == "metadata" and isinstance(value, Mapping):
                for name, wanted in value.items():
                    yield "metadata", name, _wanted(f"metadata.{name}", wanted)
            elif key in ("AND", "OR", "NOT"):
                raise bad_field(
                    f"filters.{key}", "is not supported, but for one AND of conditions. Ask several times."
                )
            else:
                raise bad_field(f"filters.{key}", "is no filter here. Filter by entities and by metadata.")


def _wanted(key: str, value: Any) -> Any:
    """A value, a list of accepted ones, or our operators for mem0's."""
    if not isinstance(value, Mapping) or set(value) == {"in"} or not value or set(value) - OPERATORS:
        return _accepted(key, value)
    if any(one == "*" for one in value.values()):
        raise bad_field(f"filters.{key}", "the wildcard * is not supported. Name the value.")
    return {f"${operator}": one for operator, one in value.items()}


def _accepted(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"in"} and isinstance(value["in"], list):
        value = value["in"]
        if not value:
            raise bad_field(f"filters.{key}", "accepts no value, so nothing could pass. Name one at least.")
    cure = f"one of {', '.join(sorted(OPERATORS))}" if key.startswith("metadata.") else "{'in': [...]}"
    if any(not isinstance(one, str | int | float) for one in (value if isinstance(value, list) else [value])):
        raise bad_field(
            f"filters.{key}", f"this operator is not supported. Give a value to equal, or {cure}."
        )
    if value == "*" or (isinstance(value, list) and "*" in value):
        raise bad_field(f"filters.{key}", "the wildcard * is not supported. Name the value.")
    return value
