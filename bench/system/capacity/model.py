"""The capacity model: closed-form rates, lags and memory of a cluster, from measured constants.

Each shard is one engine: one thread that admits turns, reads the gate, and handles LLM replies. Three
things can bind: the hottest shard's engine, the LLM servers' slots, and the order within one tenant,
whose LLM calls run one after the other. docs/capacity.md explains the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from undertow.engine.cluster.shard_map import ShardMap
from undertow.prompts.builders import Operation

DEFAULT_LOAD = 0.7  # of the engines' capacity to decide, unless a rate is given
LLM_LOAD = 0.8  # of the servers' slots, when the model chooses their number
HEAD_TENANTS = 100_000  # counted one by one; the rest is an integral

Floats = NDArray[np.float64]


class Profile(BaseModel):
    """The constants of one shard and its LLM servers. `sources` says where each group is from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    admit_s: float = Field(gt=0)
    """Seconds per turn from the queue to searchable, without the encoder."""
    encode_s: float = Field(ge=0)
    """Seconds per turn in the encoder."""
    decide_s: float = Field(ge=0)
    """Seconds per turn to decide it, without the bytes that the gate reads and without LLM calls."""
    gate_byte_s: float = Field(ge=0)
    """Seconds per byte of a tenant's rows that the gate reads for one turn."""
    call_s: float = Field(ge=0)
    """Seconds of the engine's process per LLM call: prompt, reply, memories, commit."""
    commit_s: float = Field(ge=0)
    """Seconds of the smallest commit: the least lag of a turn."""
    load_s: float = Field(ge=0)
    """Seconds to load a tenant that is not in the arena."""
    calls_per_turn: dict[Operation, float]
    """Mean LLM calls per turn, by operation."""
    busiest_calls_per_turn: float = Field(ge=0)
    """LLM calls per turn of the recorded tenant that made the most."""
    memories_per_turn: float = Field(ge=0)
    """Episodes and facts that a turn leaves behind, on average."""
    row_bytes: int = Field(gt=0)
    """Arena bytes of one turn, episode or fact."""
    arena_bytes: int = Field(gt=0)
    llm_seconds: dict[Operation, float]
    llm_slots: int | None = Field(default=None, ge=1)
    """Calls that one LLM server runs at once; None for any number."""
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
        """Arena bytes that a turn fills, with the memories made of it."""
        return self.row_bytes * (1 + self.memories_per_turn)

    def searchable_s(self) -> float:
        """Engine seconds per turn until it is searchable."""
        return self.admit_s + self.encode_s

    def decided_s(self, rows: float) -> float:
        """Engine seconds per turn until it is decided, for a tenant of so many rows."""
        return (
            self.searchable_s()
            + self.decide_s
            + rows * self.row_bytes * self.gate_byte_s
            + (self.calls * self.call_s)
        )

    @classmethod
    def read(cls, path: Path, *overlays: Path) -> Self:
        """A profile from JSON; figures of the overlays replace its own. ValueError names file and field."""
        body = _object(path)
        for overlay in overlays:
            over = _object(overlay)
            sources = {**body.get("sources", {}), **over.get("sources", {})}
            body = {**body, **over, "sources": sources}
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            problem = invalid.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise ValueError(
                f"{overlays[-1] if overlays else path}: {field}: {problem['msg']}. "
                "Make a profile with `check --out FOLDER`, or correct the field."
            ) from None

    def write(self, path: Path) -> None:
        path.write_bytes(orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2) + b"\n")


def _object(path: Path) -> dict[str, Any]:
    try:
        body = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). Give the path of a profile.") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path} is not a JSON object. Give the path of a profile.")
    return body


@dataclass(frozen=True, slots=True)
class Size:
    """What is asked: GPUs (one shard each), tenants, and turns/s in all (None: 70% of the capacity)."""

    gpus: int
    tenants: int
    turns_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.tenants < 1 or (self.turns_per_s is not None and self.turns_per_s <= 0):
            raise ValueError(f"a size needs GPUs, tenants and a rate above 0, not {self}")

    @classmethod
    def of(cls, text: str) -> Self:
        """`GPUS:TENANTS` or `GPUS:TENANTS:TURNS_PER_S`. ValueError."""
        try:
            gpus, tenants, rate, *_ = (*text.split(":", 2), None)
            return cls(int(gpus), int(float(tenants)), None if rate is None else float(rate))
        except ValueError as error:
            raise ValueError(
                f"{text!r} is not a size ({error}); write GPUS:TENANTS[:TURNS_PER_S], as in 10:1e6:5000"
            ) from None


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What all sizes of a plan share."""

    skew: float = 0.8
    """The tenant of rank i sends a share of the traffic proportional to i ** -skew (Zipf)."""
    history_turns: float = 300.0
    """Mean turns stored per tenant, distributed like the traffic."""
    largest_turns: float = 1e5
    """No tenant has more turns than this."""
    session_turns: int = 10
    """Turns per session; a tenant outside the arena is loaded once per session."""
    slowdown: float = 1.1
    """Time of a shard behind the router in multiples of the plain engine's."""


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

    def _tail(self, power: float, to: float | None = None) -> float:
        """Sum of i ** (-skew * power) over ranks behind the head up to `to`, by the midpoint rule."""
        low, high = HEAD_TENANTS + 0.5, (self.tenants if to is None else to) + 0.5
        exponent = 1 - self.skew * power
        if high <= low:
            return 0.0
        return math.log(high / low) if exponent == 0 else (high**exponent - low**exponent) / exponent

    def hottest_share(self, shards: int) -> float:
        """Share of the hottest of `shards` shards: the head by the cluster's own router, the tail evenly."""
        of = ShardMap(1, tuple(f"shard-{n:04d}" for n in range(shards)))
        owners = of.owner_ids([f"tenant-{rank}" for rank in range(1, len(self.head) + 1)])
        return float(np.bincount(owners, weights=self.head, minlength=shards).max()) + self.tail / shards

    def resident(self, turns: float) -> tuple[int, float]:
        """The most active tenants that have `turns` stored turns together: their number and traffic share."""
        share = turns / self.turns
        if share >= 1:
            return self.tenants, 1.0
        held = np.cumsum(self.head)
        if share <= held[-1]:
            return int(np.searchsorted(held, share, side="right")), share
        ranks = np.geomspace(HEAD_TENANTS, self.tenants, 1_000)
        shares = held[-1] + self.tail * np.array([self._tail(1.0, rank) for rank in ranks]) / self._tail(1.0)
        return int(np.interp(share, shares, ranks)), share


def plan(profile: Profile, size: Size, given: Assumptions, llm_servers: int | None = None) -> dict[str, Any]:
    """One size in figures: capacities, LLM servers, lags, memory, and what binds. Rates in turns/s."""
    traffic = Traffic(size.tenants, given)
    share = traffic.hottest_share(size.gpus)
    resident, resident_share = traffic.resident(size.gpus * profile.arena_bytes / profile.bytes_per_turn)
    cold = (1 - resident_share) / given.session_turns
    # the rows of the tenant that a random turn belongs to
    rows = traffic.turns * traffic.squares * (1 + profile.memories_per_turn)
    searchable_s = given.slowdown * (profile.searchable_s() + cold * profile.load_s)
    decided_s = given.slowdown * (profile.decided_s(rows) + cold * profile.load_s)
    searchable, decided = 1 / searchable_s / share, 1 / decided_s / share
    rate = size.turns_per_s or DEFAULT_LOAD * decided
    slots = profile.llm_slots
    needed = 0 if slots is None else math.ceil(rate * profile.llm_s / slots / LLM_LOAD)
    servers = llm_servers or needed
    engine_load = rate / decided
    llm_load = 0.0 if slots is None else rate * profile.llm_s / (slots * servers)
    loads = {
        "engine of the hottest shard": engine_load,
        "LLM servers": llm_load,
        "order within the largest tenant": float(traffic.head[0]) * rate * profile.llm_s,
    }
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
        "resident_tenants": resident,
        "largest_tenant_turns": round(float(traffic.head[0]) * traffic.turns),
        "arena_bytes_per_shard": round(share * traffic.turns * profile.bytes_per_turn),
        "tenants_beyond_their_order": int(np.count_nonzero(traffic.head * rate * profile.llm_s > 1)),
        "searchable_lag_s": _lag(profile.commit_s, engine_load),
        # of a tenant whose own order does not bind
        "decided_lag_s": _lag(profile.commit_s + profile.llm_s, max(engine_load, llm_load)),
        "loads": {name: round(load, 3) for name, load in loads.items()},
        "bottleneck": f"{bottleneck}, {loads[bottleneck]:.0%}",
    }


def _lag(service_s: float, load: float) -> float | None:
    """Mean lag at a load, as in an M/M/1 queue; None where the queue grows without end."""
    return round(service_s / (1 - load), 4) if load < 1 else None
