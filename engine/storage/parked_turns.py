"""Where turns that a shard has quarantined lie: beside the journals, under the tenant's key."""

from __future__ import annotations

from undertow.engine.storage.location import Location

FOLDER = "parked"


def forget(root: Location, tenant_key: str) -> None:
    """Remove the parked turns of a tenant from a cluster's root, or from a plain store."""
    for shard in root.children(FOLDER):
        root.remove(f"{FOLDER}/{shard}/{tenant_key}")
