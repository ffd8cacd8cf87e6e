"""The capacity model's input: what a shard's phases cost, what its tenants do, what LLM servers give.

A profile is JSON. Each cost says where its figures are from, so that a plan can say what it rests on.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from undertow.prompts.builders import Operation

# phases of `Trace` first; then what lies between its spans, and what other threads or disks add
PHASES = (
    *("admit", "encode", "append", "decide", "gate", "embed", "nearest", "resume", "submit", "commit"),
    *("enqueue", "step", "compact", "reply", "load"),
)

# A tenant's decisions, one letter a turn: "." waits; "r" the merge is refused, then waits; "m" merged;
# a digit fires and makes as many episodes, after a refused merge as the letter a to f (0 to 5 episodes).
WAITS, REFUSED, MERGED = ".", "r", "m"
FIRED, FIRED_AFTER_REFUSAL = "012345", "abcdef"
Life = Annotated[str, StringConstraints(pattern=f"^[{FIRED}{FIRED_AFTER_REFUSAL}{WAITS}{REFUSED}{MERGED}]+$")]


class Figures(BaseModel):
    """Base of what a profile holds: no unknown fields, fixed once made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Cost(Figures):
    """Seconds of one run of a phase: fixed + items * per item + extra * per extra.

    The extra count is arena bytes for gate, nearest and load, jobs begun for decide, and 0 for all others.
    """

    fixed_s: float = Field(default=0.0, ge=0)
    per_item_s: float = Field(default=0.0, ge=0)
    per_extra_s: float = Field(default=0.0, ge=0)
    source: str = "measured"

    def seconds(self, items: float, extra: float = 0.0) -> float:
        return self.fixed_s + items * self.per_item_s + extra * self.per_extra_s


class LLMServer(Figures):
    """Servers as a shard sees them: how long a call takes, and how many run at once (None: any number)."""

    seconds: dict[Operation, float]
    slots: int | None = Field(default=None, ge=1)
    spread: float = Field(default=0.0, ge=0, lt=1)
    """A call takes between 1 - spread and 1 + spread times its seconds."""
    source: str = "given"

    @classmethod
    def even(cls, latency_s: float) -> Self:
        """Any number of calls at once, each of `latency_s`, as the mock LLM has them."""
        return cls(seconds={"merge": latency_s, "episode": latency_s, "refine": latency_s})


class Profile(Figures):
    """Measured or given service times of one shard, and recorded lives of tenants to replay."""

    name: str
    costs: dict[str, Cost]
    lives: tuple[Life, ...] = Field(min_length=1)
    facts_per_refinement: float = Field(ge=0)
    row_bytes: int = Field(gt=0)
    """Arena bytes of one turn, episode or fact."""
    arena_bytes: int = Field(gt=0)
    commits_per_compaction: int = Field(gt=0)
    llm: LLMServer

    def cost(self, phase: str) -> Cost:
        return self.costs[phase]

    @property
    def sources(self) -> dict[str, str]:
        """Where each cost's figures are from."""
        return {**{name: cost.source for name, cost in self.costs.items()}, "llm": self.llm.source}

    @property
    def calls_per_turn(self) -> dict[Operation, float]:
        """Mean LLM calls a turn by operation, over all lives."""
        turns = sum(map(len, self.lives))
        merges = sum(c in MERGED + REFUSED + FIRED_AFTER_REFUSAL for life in self.lives for c in life)
        fired = sum(c in FIRED + FIRED_AFTER_REFUSAL for life in self.lives for c in life)
        return {"merge": merges / turns, "episode": fired / turns, "refine": self._refinements / turns}

    @property
    def made_per_turn(self) -> tuple[float, float]:
        """New episodes and facts that a turn leaves behind, on average over all lives."""
        turns = sum(map(len, self.lives))
        episodes = sum(episodes_of(c) for life in self.lives for c in life)
        return episodes / turns, self._refinements * self.facts_per_refinement / turns

    @property
    def bytes_per_turn(self) -> float:
        """Arena bytes that a turn fills with what is made of it."""
        return self.row_bytes * (1 + sum(self.made_per_turn))

    @property
    def _refinements(self) -> int:
        return sum(episodes_of(c) or c == MERGED for life in self.lives for c in life)

    @classmethod
    def read(cls, path: Path) -> Self:
        """ValueError, naming the file and the field, for one that is no profile."""
        return cls.checked(_object(path), str(path))

    @classmethod
    def checked(cls, body: Mapping[str, Any], where: str) -> Self:
        """ValueError names `where`, and what is wrong."""
        try:
            profile = cls.model_validate(body)
        except ValidationError as invalid:
            problem = invalid.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise ValueError(
                f"{where}: {field}: {problem['msg']}. Make a profile with `calibrate`, or mend the field."
            ) from None
        if wrong := set(PHASES) ^ profile.costs.keys():
            raise ValueError(f"{where}: costs must name each of {', '.join(PHASES)}; see {sorted(wrong)}")
        return profile

    def write(self, path: Path) -> None:
        path.write_bytes(orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2) + b"\n")

    def overlaid(self, path: Path) -> Profile:
        """This profile with the file's figures over its own; costs not named there stay. ValueError."""
        over = _object(path)
        body = self.model_dump()
        costs = {**body["costs"], **over.pop("costs", {})}
        return Profile.checked({**body, **over, "costs": costs}, str(path))


def episodes_of(code: str) -> int:
    """How many episodes the turn makes that a life has this letter for."""
    return max(FIRED.find(code), FIRED_AFTER_REFUSAL.find(code), 0)


def _object(path: Path) -> dict[str, Any]:
    try:
        body = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). Give a profile's path.") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path} is no JSON object. Give a profile's path.")
    return body


class Sample(NamedTuple):
    """One run of a phase, as it was timed."""

    items: float
    extra: float
    seconds: float


def fitted(samples: Sequence[Sample], *, extra: bool = False) -> Cost:
    """The non-negative cost whose error relative to the mean times, by size class, is least.

    Sizes are classed by powers of two, so that many small runs do not outvote few large ones. Relative errors
    make little of a class that a pause of the machine has hit; so the cost is scaled to give the whole of the
    times that were measured. ValueError without a sample.
    """
    if not samples:
        raise ValueError("a phase that never ran has no cost: calibrate with traffic that reaches the LLM")
    classes: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        classes[_class(sample.items), _class(sample.extra) if extra else 0].append(sample)
    means = np.array([np.mean(group, axis=0) for group in classes.values()])
    counts = np.array([len(group) for group in classes.values()])
    weights = np.sqrt(counts) / np.maximum(means[:, 2], 1e-9)
    columns = np.column_stack([np.ones(len(means)), means[:, : 1 + extra]])
    found = _least_squares(columns * weights[:, None], means[:, 2] * weights)
    if whole := float(counts @ (columns @ found)):
        found = [part * float(counts @ means[:, 2]) / whole for part in found]
    return Cost(fixed_s=found[0], per_item_s=found[1], per_extra_s=found[2] if extra else 0.0)


def _class(size: float) -> int:
    return math.floor(math.log2(size)) if size >= 1 else -1


def _least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Non-negative least squares: with so few columns, the best of all subsets that come out non-negative."""
    width = columns.shape[1]
    best, least = [0.0] * width, float(values @ values)
    for count in range(1, width + 1):
        for subset in itertools.combinations(range(width), count):
            solution, *_ = np.linalg.lstsq(columns[:, subset], values, rcond=None)
            error = float(np.sum((columns[:, subset] @ solution - values) ** 2))
            if solution.min() >= 0 and error < least * (1 - 1e-9):
                least, best = error, [0.0] * width
                for column, coefficient in zip(subset, solution.tolist(), strict=True):
                    best[column] = coefficient
    return best
