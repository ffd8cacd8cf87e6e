"""The capacity model: closed-form rates, lags and memory of a cluster, from measured constants.

Each shard is one engine: one thread that admits turns, reads the gate, and handles LLM replies. Three
things can bind: the hottest shard's engine, the LLM servers' slots, and the order within one tenant,
whose LLM calls run one after the other. docs/capacity.md explains the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from undertow.engine.cluster.shard_map import ShardMap
from undertow.prompts.operations import Operation

DEFAULT_LOAD = 0.7  # of the engines' capacity to decide, unless a rate is given
LLM_LOAD = 0.8  # of the servers' slots, when the model chooses their number
HEAD_TENANTS = 100_000  # counted one by one; the rest is an integral

Floats = NDArray[np.float64]


class Profile(BaseModel):
    """The constants of one shard and its LLM servers. `sources` names the origin of each group."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    # seconds per turn: from the queue to searchable without the encoder, in the encoder, and to decide it
    # without the bytes that the gate reads and without LLM calls
    admit_s: float = Field(gt=0)
    encode_s: float = Field(ge=0)
    decide_s: float = Field(ge=0)
    # per byte of a tenant's rows that the gate reads for one turn
    gate_byte_s: float = Field(ge=0)
    # of the engine's process per LLM call: prompt, reply, memories, commit
    call_s: float = Field(ge=0)
    # of the smallest commit, the least lag of a turn; and of loading a tenant that is not in the arena
    commit_s: float = Field(ge=0)
    load_s: float = Field(ge=0)
    # means per turn, and those of the recorded tenant with the most calls
    calls_per_turn: dict[Operation, float]
    busiest_calls_per_turn: float = Field(ge=0)
    memories_per_turn: float = Field(ge=0)
    # of one turn, episode or fact
    row_bytes: int = Field(gt=0)
    arena_bytes: int = Field(gt=0)
    llm_seconds: dict[Operation, float]
    # calls that one LLM server runs at once; None for any number
    llm_slots: int | None = Field(default=None, ge=1)
    sources: dict[str, str]

    @property
    def calls(self) -> float:
        """LLM calls per turn, all operations together."""
        return sum(self.calls_per_turn.values())

    @property
    def llm_s(self) -> float:
        """Seconds of LLM calls per turn."""
        return sum(calls * self.llm_seconds[op] for op, calls in self.calls_per_turn.items())

    @property
    def bytes_per_turn(self) -> float:
        """Arena bytes of a turn and the memories made of it."""
        return self.row_bytes * (1 + self.memories_per_turn)

    @property
    def searchable_s(self) -> float:
        """Engine seconds per turn until it is searchable."""
        return self.admit_s + self.encode_s

    def decided_s(self, rows: float) -> float:
        """Engine seconds per turn until it is decided, for a tenant of so many rows."""
        gate_s = rows * self.row_bytes * self.gate_byte_s
        return self.searchable_s + self.decide_s + gate_s + self.calls * self.call_s

    @classmethod
    def read(cls, *paths: Path) -> Self:
        """A profile from JSON; later files win over earlier ones. ValueError names file and field."""
        body: dict[str, Any] = {}
        origin: dict[str, Path] = {}  # of each field, the file that its value is from
        for path in paths:
            try:
                over = orjson.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} cannot be read as JSON ({error}). Give a profile's path.") from None
            if not isinstance(over, dict):
                raise ValueError(f"{path} is not a JSON object. Give the path of a profile.")
            origin |= dict.fromkeys(over, path)
            body |= over | {"sources": {**body.get("sources", {}), **over.get("sources", {})}}
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            problem = invalid.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise ValueError(
                f"{origin.get(str(problem['loc'][0]), paths[0])}: {field}: {problem['msg']}. "
                "Make a profile with `check --out FOLDER`, or correct the field."
            ) from None

    def write(self, path: Path) -> None:
        path.write_bytes(orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2) + b"\n")


class Size(NamedTuple):
    """GPUs (one shard each), tenants, and turns/s in all (None: 70% of the capacity)."""

    gpus: int
    tenants: int
    turns_per_s: float | None = None

    @classmethod
    def of(cls, text: str) -> Self:
        """`GPUS:TENANTS` or `GPUS:TENANTS:TURNS_PER_S`, all above 0. ValueError."""
        try:
            gpus, tenants, *rate = map(float, text.split(":"))
            if min(gpus, tenants, *rate) <= 0 or len(rate) > 1:
                raise ValueError("two or three numbers above 0")
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not a size ({error}); write GPUS:TENANTS[:TURNS_PER_S], as in 10:1e6:5000"
            ) from None
        return cls(int(gpus), int(tenants), rate[0] if rate else None)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Shared by all sizes of a plan.

    The tenant of rank i sends a share of the traffic proportional to i ** -skew (Zipf), and has turns in
    proportion: `history_turns` in the mean, at most `largest_turns`. A tenant outside the arena is loaded
    once per session. `slowdown`: time of a shard behind the router, in multiples of the plain engine's.
    """

    skew: float = 0.8
    history_turns: float = 300.0
    largest_turns: float = 1e5
    session_turns: int = 10
    slowdown: float = 1.1


class Traffic:
    """Shares of the traffic by tenant: Zipf with a cap on the largest, exact for the first HEAD_TENANTS."""

    def __init__(self, tenants: int, given: Assumptions) -> None:
        if given.skew < 0 or given.history_turns <= 0 or given.largest_turns < given.history_turns:
            raise ValueError("give a skew of 0 or more, a history above 0, and no smaller largest tenant")
        self.tenants, self.skew = tenants, given.skew
        self.turns = tenants * given.history_turns
        head = np.arange(1, min(tenants, HEAD_TENANTS) + 1, dtype=np.float64) ** -given.skew
        tail, cap = self._tail(1.0), 1.0
        for _ in range(20):  # the cap and the sum of the weights depend on each other
            total = float(np.minimum(head, cap).sum()) + tail
            cap = min(cap, max(given.largest_turns / self.turns * total, float(head[-1])))
        total = float(np.minimum(head, cap).sum()) + tail
        self.head: Floats = np.minimum(head, cap) / total
        self.tail = tail / total
        self.squares = float((self.head**2).sum()) + self._tail(2.0) / total**2

    def _tail(self, power: float) -> float:
        """Sum of i ** (-skew * power) over the ranks behind the head, by the midpoint rule."""
        low, high, exponent = HEAD_TENANTS + 0.5, self.tenants + 0.5, 1 - self.skew * power
        if high <= low:
            return 0.0
        return math.log(high / low) if exponent == 0 else (high**exponent - low**exponent) / exponent

    def hottest_share(self, shards: int) -> float:
        """Share of the hottest of `shards` shards: the head by the cluster's own router, the tail evenly."""
        of = ShardMap(1, tuple(f"shard-{n:04d}" for n in range(shards)))
        owners = of.owner_ids([f"tenant-{rank}" for rank in range(1, len(self.head) + 1)])
        return float(np.bincount(owners, weights=self.head, minlength=shards).max()) + self.tail / shards


def plan(profile: Profile, size: Size, given: Assumptions, llm_servers: int | None = None) -> dict[str, Any]:
    """One size in figures: capacities, LLM servers, lags, memory, and the bottleneck. Rates in turns/s."""
    traffic = Traffic(size.tenants, given)
    share, largest = traffic.hottest_share(size.gpus), float(traffic.head[0])
    # turns are distributed like the traffic, so the share of turns in the arenas is that of resident traffic
    resident = min(1.0, size.gpus * profile.arena_bytes / profile.bytes_per_turn / traffic.turns)
    load_s = (1 - resident) / given.session_turns * profile.load_s
    # the rows of the tenant that a random turn belongs to
    rows = traffic.turns * traffic.squares * (1 + profile.memories_per_turn)
    searchable = 1 / (given.slowdown * (profile.searchable_s + load_s) * share)
    decided = 1 / (given.slowdown * (profile.decided_s(rows) + load_s) * share)
    rate = size.turns_per_s or DEFAULT_LOAD * decided
    slots = profile.llm_slots
    needed = 0 if slots is None else math.ceil(rate * profile.llm_s / slots / LLM_LOAD)
    servers = llm_servers or needed
    loads = {
        "engine of the hottest shard": rate / decided,
        "LLM servers": 0.0 if slots is None else rate * profile.llm_s / (slots * servers),
        "order within the largest tenant": largest * rate * profile.llm_s,
    }
    engine_load, llm_load, _ = loads.values()
    bottleneck = max(loads, key=lambda name: loads[name])
    return {
        "gpus": size.gpus,
        "tenants": size.tenants,
        "searchable_capacity_per_s": round(searchable),
        "decided_capacity_per_s": round(decided),
        "offered_per_s": round(rate, 1),
        "llm_calls_per_s": round(rate * profile.calls, 1),
        "llm_servers_needed": needed,
        "llm_servers": servers,
        "hottest_over_mean_shard": round(share * size.gpus, 3),
        "resident_traffic_share": round(resident, 3),
        "largest_tenant_turns": round(largest * traffic.turns),
        "arena_bytes_per_shard": round(share * traffic.turns * profile.bytes_per_turn),
        "tenants_beyond_their_order": int(np.count_nonzero(traffic.head * rate * profile.llm_s > 1)),
        "searchable_lag_s": _lag(profile.commit_s, engine_load),
        # of a tenant that its own order does not bind
        "decided_lag_s": _lag(profile.commit_s + profile.llm_s, max(engine_load, llm_load)),
        "loads": {name: round(load, 3) for name, load in loads.items()},
        "bottleneck": f"{bottleneck}, {loads[bottleneck]:.0%}",
    }


def _lag(service_s: float, load: float) -> float | None:
    """Mean lag at a load, as in an M/M/1 queue; None if the queue grows without end."""
    return round(service_s / (1 - load), 4) if load < 1 else None
