"""Which shard owns a tenant: rendezvous hashing over a versioned map in the cluster's root.

Each (shard, tenant) pair has a pseudorandom weight, and the shard of the highest weight owns the tenant
(Thaler and Ravishankar, 1998). So adding or removing a shard moves only the tenants that it gains or loses,
an expected 1/n of them. The weight is computed from the tenant's keyed hash, as erased names are known by
that alone. All shards of a root share one hash key; the map carries it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, Self, get_args

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location, StoreError

FOLDER = "map"
# the folder of a root that holds the shards' stores
STORES = "shards"
Phase = Literal["moving", "closing", "clearing"]
PHASES: tuple[Phase, ...] = get_args(Phase)
SHARD_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
# weights worked out at a time
PAIRS_PER_BLOCK = 1 << 20


class MapConflict(UndertowError):
    """Another process has published a map of this version already."""


class Removed(UndertowError):
    """The shard is not in the newest map: its tenants live at the others."""

    def __init__(self, shard: str, version: int) -> None:
        super().__init__(shard, version)
        self.shard, self.version = shard, version

    def __str__(self) -> str:
        return f"shard {self.shard} is none of the cluster's, by map {self.version}. Ask another."


@dataclass(frozen=True)
class ShardMap:
    """The shards of a cluster. While `before` is set, tenants move from their owners there to `shards`.

    A resharding takes one version for each of its phases, then a settled one (no phase):
    *moving*: tenants leave their former owners; new tenants still begin there.
    *closing*: former owners take no new tenants; the last ones leave.
    *clearing*: the owners serve all tenants; moved rows are removed at the former owners.

    `shards` and `before` are kept sorted. `hash_key`: hexadecimal; empty hashes without a key.
    """

    version: int
    shards: tuple[str, ...]
    before: tuple[str, ...] | None = None
    hash_key: str = ""
    phase: Phase | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", _checked(self.shards))
        if self.before is not None:
            object.__setattr__(self, "before", _checked(self.before))
        if self.version < 1:
            raise ValueError(f"a shard map's version is 1 or more, not {self.version}")
        if (self.before is None) != (self.phase is None) or self.phase not in (None, *PHASES):
            raise ValueError(f"{self.phase!r} is no phase of a map with {self.before=}")

    @classmethod
    def new(cls, shards: Sequence[str]) -> Self:
        """The first map of a cluster, with a hash key of its own. ValueError for unsound shard ids."""
        return cls(1, tuple(shards), hash_key=secrets.token_hex(32))

    # ---- who owns what

    def tenant_key(self, tenant: str) -> str:
        """The keyed 128-bit hash that the journals of this cluster know the tenant by."""
        return self._digest(tenant).hex()

    def owner(self, tenant: str) -> str:
        """The shard that the tenant belongs to; while it moves, the one it moves to."""
        return self.shards[int(self.owner_ids([tenant])[0])]

    def owners(self, tenants: Sequence[str]) -> list[str]:
        """Like `owner`, for many at once."""
        return [self.shards[i] for i in self.owner_ids(tenants)]

    def owner_ids(self, tenants: Sequence[str]) -> NDArray[np.intp]:
        """Positions in `shards` of the tenants' owners, [n]."""
        return _highest(self._points, self._points_of(tenants))

    def home(self, tenant: str) -> str:
        """The shard to ask first: the owner, or the former owner until all tenants have moved."""
        return self.homes([tenant])[0]

    def homes(self, tenants: Sequence[str]) -> list[str]:
        """Like `home`, for many at once."""
        if self.before is None or self.phase == "clearing":
            return self.owners(tenants)
        return [self.before[i] for i in _highest(self._points_before, self._points_of(tenants))]

    def leaving(self, shard: str, keys: Sequence[str]) -> dict[str, str]:
        """The targets of those of the tenants with these keys that must leave `shard`, by key."""
        if self.before is None or shard not in self.before:
            return {}
        points = np.array([int(key[:16], 16) for key in keys], dtype=np.uint64)
        old, new = _highest(self._points_before, points), _highest(self._points, points)
        mine = self.before.index(shard)
        pairs = zip(keys, old, new, strict=True)
        return {key: self.shards[n] for key, o, n in pairs if o == mine and self.shards[n] != shard}

    def _points_of(self, tenants: Sequence[str]) -> NDArray[np.uint64]:
        digests = b"".join([self._digest(tenant) for tenant in tenants])
        return np.frombuffer(digests, dtype=">u8")[::2].astype(np.uint64)

    def _digest(self, tenant: str) -> bytes:
        data = tenant.encode(errors="surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=16).digest()

    @cached_property
    def _key(self) -> bytes:
        return bytes.fromhex(self.hash_key)

    @cached_property
    def _points(self) -> NDArray[np.uint64]:
        return _points_of_shards(self.shards)

    @cached_property
    def _points_before(self) -> NDArray[np.uint64]:
        return _points_of_shards(self.before or ())

    # ---- changes

    @property
    def all_shards(self) -> tuple[str, ...]:
        """All shards that must run under this map, sorted, with those that are being removed."""
        return tuple(sorted({*self.shards, *(self.before or ())}))

    def require(self, shard: str) -> None:
        """Removed unless the shard is one of those that must run."""
        if shard not in self.all_shards:
            raise Removed(shard, self.version)

    def toward(self, shards: Iterable[str]) -> ShardMap:
        """The next version, under which tenants move to `shards`. ValueError while others still move."""
        if self.before is not None:
            raise ValueError(f"map {self.version} is still moving tenants; resume that first")
        version, new = self.version + 1, tuple(shards)
        return replace(self, version=version, shards=new, before=self.shards, phase=PHASES[0])

    def after(self) -> ShardMap:
        """The next version of the resharding under way: its next phase, or its end. ValueError."""
        if self.phase is None:
            raise ValueError(f"no one moves under map {self.version}")
        rest = PHASES[PHASES.index(self.phase) + 1 :]
        before = self.before if rest else None
        return replace(self, version=self.version + 1, before=before, phase=rest[0] if rest else None)

    @property
    def began(self) -> int | None:
        """The version that began the resharding under way; None for none."""
        return None if self.phase is None else self.version - PHASES.index(self.phase)


def load(root: Location) -> ShardMap:
    """The newest map of a cluster's root. StoreError: there is none, or it is damaged."""
    versions = root.list(FOLDER)
    if not versions:
        raise StoreError(f"{root} is no cluster's root (it has no map/). Check the path.")
    data = root.read(versions[-1]) or b""
    try:
        return ShardMap(**orjson.loads(data))
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{root / versions[-1]} is no shard map ({error}). Restore it from a backup."
        ) from error


def exists(root: Location) -> bool:
    """Whether a cluster's root lies there."""
    return root.exists(_name(1))


def publish(root: Location, shard_map: ShardMap) -> None:
    """Put a map in force. MapConflict: another map of this version is in force already.

    The file is created only if there is none, so of two processes one succeeds. Publishing the same map
    again changes nothing.
    """
    data = orjson.dumps(asdict(shard_map), option=orjson.OPT_INDENT_2)
    name = _name(shard_map.version)
    if not root.create(name, data) and root.read(name) != data:
        raise MapConflict(
            f"{root / name} is there already: another process is changing the cluster. "
            "Wait until it is done, then try again."
        )


def _name(version: int) -> str:
    return f"{FOLDER}/{version:08d}.json"


def _checked(shards: Iterable[str]) -> tuple[str, ...]:
    found = tuple(sorted(shards))
    if not found or len(set(found)) < len(found):
        raise ValueError(f"a cluster needs one shard or more, each named once, not {list(found)}")
    for shard in found:
        if not SHARD_ID.fullmatch(shard):
            raise ValueError(
                f"{shard!r} is no shard id: it must be 1 to 63 of a-z, 0-9, - and _, a letter or digit first"
            )
    return found


def _points_of_shards(shards: Sequence[str]) -> NDArray[np.uint64]:
    digests = b"".join(hashlib.blake2b(shard.encode(), digest_size=8).digest() for shard in shards)
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def _highest(shards: NDArray[np.uint64], tenants: NDArray[np.uint64]) -> NDArray[np.intp]:
    """For each tenant's point the position of the shard with the highest weight; of equals the first."""
    owners = np.empty(len(tenants), dtype=np.intp)
    block = max(1, PAIRS_PER_BLOCK // max(1, len(shards)))
    for start in range(0, len(tenants), block):
        pairs = tenants[start : start + block, None] ^ shards[None, :]
        owners[start : start + block] = _mix(pairs).argmax(axis=1)
    return owners


def _mix(points: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection under which each bit of the argument flips half of the result's (splitmix64's end)."""
    points ^= points >> np.uint64(30)
    points *= np.uint64(0xBF58476D1CE4E5B9)
    points ^= points >> np.uint64(27)
    points *= np.uint64(0x94D049BB133111EB)
    points ^= points >> np.uint64(31)
    return points
