"""The protocol between a policy and the scheduler.

A policy is a coroutine per log record. It asks for work by yielding effects and gets the result
back; it touches no GPU, socket or file. The scheduler gathers the effects of all tenants and runs
each kind as one batch. Between two effects a policy must be a pure function of what it was given:
the scheduler may start it ahead of time and throw it away.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Decision, Memory, MemoryKind
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import Prompt

T = TypeVar("T")
Vector = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the gate compares with, as in force at a seq (paper, sections 3.2, 3.3 and 3.6)."""

    theta_sim: float
    theta_merge: float
    theta_count: int

    @property
    def k_gate(self) -> int:
        return 2 * self.theta_count


@dataclass(frozen=True, slots=True)
class Tiers:
    """What an answer is given of a tenant's memories, where the settings say nothing else.

    The k best of each tier. `raw_of_best`: of how many of the best episodes the words are given too.
    `consolidated`: whether turns that memories were made of are given as turns.
    """

    k_sub: int = 10
    k_epi: int = 5
    k_sem: int = 10
    raw_of_best: int = 0
    consolidated: bool = True


@dataclass(frozen=True, slots=True)
class Learns:
    """What of an answer a policy wants to have in the log, to learn from it when its record is decided.

    `used`: which facts the answer was given. `missed`: a question that its episodes covered and its facts did
    not, for `Policy.reconsolidate`.
    """

    used: bool = False
    missed: bool = False


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as a policy sees it; `messages`: the lines that `text` is made of."""

    seq: int
    text: str
    timestamp: str | None
    messages: tuple[str, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A stored memory and its exact cosine to the query."""

    memory: Memory
    score: float


@dataclass(frozen=True, slots=True)
class ReadGate:
    """Effect: nearest episode and relevant set of a turn, among what stood before it. -> GateReading"""

    seq: int


@dataclass(frozen=True, slots=True)
class GateReading:
    """Answer to `ReadGate`: E* of equation 6 and R_i of equation 5.

    `relevant` are seqs, nearest first, with their exact cosines; `count` is how many live turns
    reach theta_sim, `count > len(relevant)` says that the k_gate cut bound.
    """

    episode: Memory | None
    episode_score: float | None
    relevant: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """Effect: vectors of texts. -> float16 [len(texts), dim], normalised"""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nearest:
    """Effect: the k stored memories of a kind nearest to a vector. -> list[Scored], nearest first"""

    kind: MemoryKind
    vector: Vector
    k: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Effect: one LLM call. -> the validated reply (an instance of `prompt.reply`)

    BadReply is raised at the yield when the reply stays invalid after one repair.
    """

    prompt: Prompt


Effect = ReadGate | Embed | Nearest | Complete


@dataclass(frozen=True, slots=True)
class Draft:
    """A memory that a job has made, with its vector (None: this version deletes the memory)."""

    memory: Memory
    vector: Vector | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a policy decided for one record. All of it is committed at once.

    `settled` are the turns that leave the gates (consolidated or parked); `revived` come back. `shed` are
    deletions in generations that are no longer made; no policy sets it. `repairs`: how many numbers in
    replies had to be put right (NEMORI's partitions).
    """

    decision: Decision
    reading: GateReading | None = None
    merge_asked: bool = False
    cluster: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    revived: tuple[int, ...] = ()
    drafts: tuple[Draft, ...] = ()
    shed: tuple[Draft, ...] = ()
    reason: str | None = None
    operation: str | None = None
    repairs: int = 0


class MemoryView(Protocol):
    """A tenant's memories as they stand when a record is decided. Read-only."""

    @property
    def tenant(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def thresholds(self) -> Thresholds: ...

    def turn(self, seq: int) -> TurnView: ...

    def exists(self, seq: int) -> bool:
        """Whether the turn was not deleted."""
        ...

    def open_turns(self) -> Sequence[int]:
        """The turns in front of this record that stand behind every settled one, in order.

        Deleted ones are left out. What a policy that gathers turns has yet to make memories of.
        """
        ...

    def uses(self) -> Mapping[str, int]:
        """How many answers were given each fact, by its id, as the log tells; where that is not kept, {}."""
        ...

    def current(self, kind: MemoryKind) -> Sequence[Memory]:
        """All current memories of a kind, in order of birth."""
        ...

    def ended(self, kind: MemoryKind) -> Sequence[Memory]:
        """The last, empty versions of the deleted memories of a kind; `forgotten` ones rest on nothing."""
        ...


Decide = Generator[Effect, Any, PolicyResult]


class Policy(Protocol):
    """Turns records of the log into memories."""

    name: str
    tiers: Tiers
    learns: Learns

    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Decide the turn `seq`."""
        ...

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        """A flush: turns that wait for others to come wait no longer."""
        ...

    def replay(self, seq: int, job: LlmJob, memory: MemoryView) -> Decide:
        """Run a parked job again, with its stored cluster; what it makes carries `seq`."""
        ...

    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what rested on a deleted turn; what it makes carries `seq`.

        Where the LLM has no usable reply, all that rested on the turn is deleted, and what a user deleted of
        it is deleted once more: its history has to go. A generation that is no longer made relies on that.
        """
        ...

    def reconsolidate(
        self, seq: int, question: str, episode_ids: Sequence[str], memory: MemoryView
    ) -> Decide:
        """Take what the question missed over from these episodes; what it makes carries `seq`.

        It may be another policy that wanted the record in the log: before a change, or an import.
        """
        ...


def nothing_to_decide() -> Decide:
    """For records that change no memory."""
    return PolicyResult(Decision.WAITS)
    yield


class PromptTooLong(Exception):
    """A prompt does not fit the model's context and cannot be split further."""


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """How long a prompt may be, in tokens; estimated without the model's tokenizer."""

    context_tokens: int
    reply_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """What the reply leaves of the context."""
        return self.context_tokens - self.reply_tokens

    def fits(self, prompt: Prompt) -> bool:
        return prompt.size_tokens <= self.prompt_tokens

    def that_fit(self, items: Sequence[T], prompt_of: Callable[[Sequence[T]], Prompt]) -> list[T]:
        """Each of the items, the first ones first, that there is room for beside those taken before it.

        One that is too long is passed over: it takes no later one along.
        """
        if self.fits(prompt_of(items)):
            return list(items)
        kept: list[T] = []
        for item in items:
            if self.fits(prompt_of([*kept, item])):
                kept.append(item)
        return kept


def cosine(a: Vector, b: Vector) -> float:
    """Exact dot product of two fp16 unit vectors: in fp64 no sum of such products is rounded."""
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def rewording(memory: Memory, text: str, seq: int) -> Memory:
    """The version in a user's words: no prompt and no model has made it, all else stays."""
    return replace(
        memory,
        text=text,
        version=memory.version + 1,
        made_at_seq=seq,
        prompt_version=None,
        model=None,
    )


def deletion(memory: Memory, seq: int) -> Memory:
    """The version that ends a memory."""
    return replace(memory, text="", version=memory.version + 1, made_at_seq=seq, deleted=True)


def forgotten(memory: Memory, seq: int) -> Memory:
    """The version that ends a memory with a turn whose words it may hold: it rests on nothing any more.

    So the turns of a deleted memory are those of one that a user has deleted, which no replay makes again.
    """
    return replace(deletion(memory, seq), source_seqs=(), source_messages=(), shown_seqs=())
