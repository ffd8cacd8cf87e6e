"""A running service in the place of a store, for the commands that read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undertow.engine.base.results import Report
from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import WrongUsage, wrong_usage

if TYPE_CHECKING:
    from undertow.serving.client import Client
    from undertow.serving.client.results import Hit

KEY_VARIABLE = "UNDERTOW_API_KEY"
# someone waits at the terminal
PATIENCE_S = 5.0
SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class ServiceUrl(Location):
    """The address of a service. Only an option of a command that reads gives one."""


@contextmanager
def client_of(service: ServiceUrl) -> Iterator[Client]:
    """A client with the key in UNDERTOW_API_KEY. WrongUsage: the service wants another one."""
    from undertow.serving.client import AuthError, Client, Retries

    with wrong_usage(f"{KEY_VARIABLE}:"):
        client = Client(service.uri, os.environ.get(KEY_VARIABLE) or None, retries=Retries(PATIENCE_S))
    with client:
        try:
            yield client
        except AuthError:
            what = "refuses this key" if os.environ.get(KEY_VARIABLE) else "wants a key"
            cure = "`undertow keys create` makes one where the service runs"
            raise WrongUsage(f"{service} {what}: set {KEY_VARIABLE}; {cure}.") from None


def hit_report(hit: Hit) -> Report:
    return {**hit.model_dump(), "source_seqs": list(hit.source_seqs)}


class ServedReports:
    """What commands read of `Reports`, from a service.

    Lists are of an export, so that their records have the same fields; those of `get` and `history` are
    the service's.
    """

    def __init__(self, client: Client, tenant: str | None = None) -> None:
        """`tenant`: whose memories `get` and `history` look for."""
        self._client, self._tenant = client, tenant

    encoder_digest = None
    """A service does not name its encoder's digest, so its vectors are not taken back by `ingest`."""

    def tenant_sizes(self) -> list[Report]:
        """One record a tenant. A service does not count their turns in one call."""
        return [{"tenant": name} for name in self._client.tenants()]

    def turns(self, tenant: str, *, every: bool = False) -> list[Report]:
        """The turns in seq order. WrongUsage: `every`, as a service tells nothing of deleted ones here."""
        if every:
            raise WrongUsage("--all lists no deleted turns over a service. `undertow explain` shows them.")
        turns = sorted(self._records(tenant, "turn"), key=lambda record: int(record["seq"]))
        return [{name: turn[name] for name in turn if name != "dedupe_key"} for turn in turns]

    def memories(self, tenant: str, kind: str, *, every: bool = False) -> list[Report]:
        """Episodes or facts in order of birth. `every`: with all their earlier versions."""
        versions = [record for record in self._records(tenant, kind) if not record["deleted"]]
        if not every:
            shown = {memory.id for memory in self._client.get_all(tenant, kinds=[kind])}  # type: ignore[list-item]
            versions = [r for r in versions if r["id"] in shown and r["superseded_at_seq"] is None]
        return sorted(versions, key=_birth)

    def _records(self, tenant: str, kind: str) -> list[Report]:
        return [record for record in self._client.export(tenant) if record["kind"] == kind]

    def explain(self, tenant: str) -> list[Report]:
        return list(self._client.explain(tenant))

    def export(self, tenant: str, *, vectors: bool = False) -> Iterator[Report]:
        return self._client.export(tenant, vectors=vectors)

    def ids_from(self, beginning: str) -> set[str]:
        """The ids of the tenant's present memories that begin so. It reads all ids."""
        memories = self._client.get_all(self._owner())
        return {memory.id for memory in memories if memory.id.startswith(beginning)}

    def get(self, memory_id: str) -> Report:
        return _named_as_stored(self._client.get(self._owner(), memory_id).model_dump())

    def history(self, memory_id: str) -> list[Report]:
        versions = self._client.history(self._owner(), memory_id)
        return [_named_as_stored(version.model_dump()) for version in versions]

    def _owner(self) -> str:
        if self._tenant is None:
            raise WrongUsage("over a service, say with --tenant whose memory it is")
        return self._tenant


def _birth(record: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(record[name]) for name in ("generation", "born_at_seq", "ordinal", "version"))


def _named_as_stored(memory: Report) -> Report:
    return {**memory, "text": memory["memory"]}
