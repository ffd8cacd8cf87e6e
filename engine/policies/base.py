"""The protocol between a policy and the scheduler.

A policy is a coroutine per log record. It yields effects and receives their results; it uses no GPU, socket
or file. The scheduler gathers the effects of all tenants and runs each kind as one batch. Between two effects
a policy must be a pure function of its inputs: the scheduler may start it ahead of time and discard it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Decision, Memory, MemoryKind

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.storage.row_codec import LlmJob
    from undertow.prompts.builders import Prompt

T = TypeVar("T")
Vector = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The gate's thresholds in force at a seq (RecMem, sections 3.2, 3.3 and 3.6).

    `sim_share`, `merge_share`: the share of the tenant's pairs of turns that theta_sim or theta_merge links,
    found anew as the log grows (`PairThetas`); None: it is fixed.
    """

    theta_sim: float
    theta_merge: float
    theta_count: int
    sim_share: float | None = None
    merge_share: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Those of the settings. A theta that is not fixed has its value for a tenant's first turns."""
        s = settings
        thetas = s.similarity_threshold, s.merge_threshold
        return cls(*thetas, s.recurrence_count, s.sim_share, s.merge_share)

    @property
    def k_gate(self) -> int:
        return 2 * self.theta_count

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the thetas that are not fixed, by the theta's name."""
        shares = {"theta_sim": self.sim_share, "theta_merge": self.merge_share}
        return {name: share for name, share in shares.items() if share is not None}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the `settings` record that states them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Tiers:
    """The default context of an answer: the k best memories of each tier.

    `raw_of_best`: for how many of the best episodes their turns are included too. `consolidated`: whether
    turns that were consolidated into memories are included as turns. `linked`: whether facts that the best
    link to are included. `recent`: the newest turns, which are always included; `always`: the kind of facts
    that is. `narratives`: whether episodes are shown by their text; else by their turns' words. `tokens`: the
    budget that the best of all tiers fill; 0: none.
    """

    k_sub: int = 10
    k_epi: int = 5
    k_sem: int = 10
    raw_of_best: int = 0
    consolidated: bool = True
    linked: bool = False
    recent: int = 0
    always: str | None = None
    narratives: bool = True
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Learns:
    """Which feedback from answers a policy wants in the log.

    `used`: the facts that an answer was given. `missed`: a question that its episodes covered and its facts
    did not, for `Policy.reconsolidate`.
    """

    used: bool = False
    missed: bool = False


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as a policy sees it. `messages` are the lines of `text`."""

    seq: int
    text: str
    timestamp: str | None
    messages: tuple[str, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A stored memory and its exact cosine similarity to the query."""

    memory: Memory
    score: float


@dataclass(frozen=True, slots=True)
class ReadGate:
    """Effect: the nearest episode and the relevant set of a turn, among earlier ones. -> GateReading"""

    seq: int


@dataclass(frozen=True, slots=True)
class GateReading:
    """Result of `ReadGate`: E* of equation 6 and R_i of equation 5.

    `relevant` are seqs, nearest first, and `scores` their exact cosines. `count` is the number of live turns
    that reach theta_sim; if it exceeds len(relevant), k_gate has cut the list.
    """

    episode: Memory | None
    episode_score: float | None
    relevant: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """Effect: embed texts. -> float16 [len(texts), dim], normalised"""

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

    The yield raises BadReply if the reply is still invalid after one repair.
    """

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class PairThetas:
    """Effect: the cosines that these shares of pairs of turns reach, among the turns up to a record.

    -> tuple[float, ...], one a share; () if the tenant has no pair
    """

    seq: int
    shares: tuple[float, ...]


Effect = ReadGate | Embed | Nearest | Complete | PairThetas


@dataclass(frozen=True, slots=True)
class Draft:
    """A memory version made by a job, with its vector (None: this version deletes the memory)."""

    memory: Memory
    vector: Vector | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a policy decided for one record. It is committed as a whole.

    `settled` turns leave the gates (consolidated or parked); `revived` turns return to them. `salient`: turns
    that were read though their topics did not recur, on the quota of `salient_day`.
    `earlier_deletions` are deletions in earlier generations; the engine sets it, no policy. `repairs` counts
    the numbers in replies that had to be corrected (NEMORI's partitions). `thetas`: by name, those in force
    from the next record on.
    """

    decision: Decision
    reading: GateReading | None = None
    merge_asked: bool = False
    cluster: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    revived: tuple[int, ...] = ()
    drafts: tuple[Draft, ...] = ()
    earlier_deletions: tuple[Draft, ...] = ()
    reason: str | None = None
    operation: str | None = None
    repairs: int = 0
    salient: tuple[int, ...] = ()
    salient_day: str | None = None
    thetas: Mapping[str, float] = field(default_factory=dict)


class MemoryView(Protocol):
    """A tenant's log and memories as of the record being decided. Read-only."""

    @property
    def tenant(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def thresholds(self) -> Thresholds: ...

    def thetas_are_due(self, seq: int) -> bool:
        """Whether thresholds that state a share are to be found anew once this turn is decided."""
        ...

    def turn(self, seq: int) -> TurnView: ...

    def exists(self, seq: int) -> bool:
        """Whether the record is a turn that was not deleted."""
        ...

    def open_turns(self) -> Sequence[int]:
        """The turns before this record and after every settled one, in order, without deleted ones.

        These are the turns that a policy with windows has yet to process.
        """
        ...

    def turns_before(self, seq: int) -> int:
        """The number of turns before this record, deleted ones included."""
        ...

    def turns_to(self, seq: int, count: int) -> Sequence[int]:
        """Of the last `count` turns up to and with this record those that were not deleted, in order."""
        ...

    def look_back(
        self, seqs: Sequence[int], count: int, measure: Callable[[TurnView], int]
    ) -> NDArray[np.int32]:
        """What `measure` makes of the last `count` turns up to and with each of these: [len(seqs), count].

        -1: there is no such turn, or it was deleted. Results are kept, so every call has the same `measure`.
        """
        ...

    def counts(self, seq: int) -> bool:
        """Whether the turn still counts in the gates: it was neither consolidated nor parked."""
        ...

    def salient_tokens(self, day: str) -> int:
        """The tokens that salient turns of this day have cost."""
        ...

    def last_read_at_flush(self) -> int:
        """The seq of the last flush that read salient turns; -1: none has."""
        ...

    def uses(self) -> Mapping[str, int]:
        """By id of a fact: the number of answers that used it. {} if the log has no such feedback."""
        ...

    def current(self, kind: MemoryKind) -> Sequence[Memory]:
        """All current memories of a kind, in order of creation."""
        ...

    def ended(self, kind: MemoryKind) -> Sequence[Memory]:
        """The last, empty versions of deleted memories of a kind. Those of `forgotten` have no sources."""
        ...


Decide = Generator[Effect, Any, PolicyResult]


class Policy(ABC):
    """Turns records of the log into memories. By default no turn waits, and answers give no feedback."""

    name: ClassVar[str]
    learns: Learns = Learns()

    def __init__(self, budget: PromptBudget) -> None:
        self._budget = budget

    @property
    def tiers(self) -> Tiers:
        """What an answer is given by default."""
        return Tiers()

    @abstractmethod
    def decide(self, seq: int, memory: MemoryView) -> Decide:
        """Decide the turn `seq`."""

    def flush(self, seq: int, memory: MemoryView) -> Decide:
        """Process turns that wait for later ones now."""
        return nothing_to_decide()

    def replay(self, seq: int, job: LlmJob, memory: MemoryView) -> Decide:
        """Run a parked job again with the turns of its cluster that still exist."""
        turns = tuple(s for s in job.cluster if memory.exists(s))
        if not turns:
            return PolicyResult(Decision.WAITS, reason="all its turns were deleted")
        return (yield from self.rerun(seq, job, turns, memory))

    @abstractmethod
    def rerun(self, seq: int, job: LlmJob, turns: tuple[int, ...], memory: MemoryView) -> Decide:
        """Run a parked job again with these turns of its cluster. Its memories carry `seq`."""

    @abstractmethod
    def forget(self, seq: int, turn_seq: int, memory: MemoryView) -> Decide:
        """Remake what was derived from a deleted turn. The new versions carry `seq`.

        Without a usable LLM reply, everything derived from the turn is deleted. What users had deleted of it
        is deleted once more, which redacts its history. Earlier generations rely on that.
        """

    def reconsolidate(
        self, seq: int, question: str, episode_ids: Sequence[str], memory: MemoryView
    ) -> Decide:
        """Add the facts that the question missed, from these episodes. Its memories carry `seq`.

        The record may stem from another policy: before a change of policy, or from an import.
        """
        return nothing_to_decide()


def nothing_to_decide() -> Decide:
    """Decides records that change no memory."""
    return PolicyResult(Decision.WAITS)
    yield


class PromptTooLong(Exception):
    """A prompt exceeds the model's context and cannot be split further."""


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """The maximum length of a prompt, in tokens estimated without the model's tokenizer."""

    context_tokens: int
    reply_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """The context without the reply's tokens."""
        return self.context_tokens - self.reply_tokens

    def fits(self, prompt: Prompt) -> bool:
        return prompt.size_tokens <= self.prompt_tokens

    def select_fitting(self, items: Sequence[T], prompt_of: Callable[[Sequence[T]], Prompt]) -> list[T]:
        """The items that fit, chosen greedily in order. An item that is too long is skipped."""
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
    """The version with a user's text, without prompt version and model."""
    return replace(
        memory,
        text=text,
        index_text="",
        version=memory.version + 1,
        made_at_seq=seq,
        prompt_version=None,
        model=None,
    )


def deletion(memory: Memory, seq: int) -> Memory:
    """The last version, which deletes a memory."""
    version = memory.version + 1
    return replace(memory, text="", index_text="", version=version, made_at_seq=seq, deleted=True)


def forgotten(memory: Memory, seq: int) -> Memory:
    """The last version of a memory that may contain a deleted turn's words. It has no sources.

    So only memories that a user deleted keep sources, which no replay remakes.
    """
    return replace(deletion(memory, seq), source_seqs=(), source_messages=(), shown_seqs=(), links=())


def endings(lost: Iterable[Memory], ended: Iterable[Memory], seq: int) -> tuple[Draft, ...]:
    """The last versions of memories that may contain a deleted turn's words, and of those `ended` before.

    The history of the latter still has the words: another deletion redacts it.
    """
    last = [*(forgotten(m, seq) for m in lost), *(deletion(m, seq) for m in ended)]
    return tuple(Draft(m, None) for m in last)
