"""One job of NEMORI (algorithm 1): makes episodes and facts of a window, and remakes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from undertow.engine.base.config import Ablation, EpisodeText
from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.attribution import telling_words, turns_that_say
from undertow.engine.policies.base import (
    Draft,
    Effect,
    Embed,
    MemoryView,
    PolicyResult,
    PromptBudget,
    TurnView,
    Vector,
    forgotten,
)
from undertow.engine.policies.nemori.management import Management, Origin, Statement
from undertow.engine.policies.nemori.partition import partition_of
from undertow.engine.policies.work import MessageRef, Steps, Work, as_shown, messages_of, named, parked
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    distil_direct_prompt,
    distil_prompt,
    integrate_prompt,
    narrate_prompt,
    partition_prompt,
    predict_prompt,
    select_prompt,
)
from undertow.prompts.reply_schemas import (
    NarrativeReply,
    PartitionReply,
    PredictionReply,
    SelectReply,
    StatementDraft,
    StatementsReply,
)

# K_e of section 4.1
CANDIDATE_EPISODES = 5

PromptOf = Callable[[Sequence[ShownTurn]], Prompt]


class WindowJob(Work):
    """The steps of one job."""

    operation = "partition"

    def __init__(
        self,
        seq: int,
        view: MemoryView,
        budget: PromptBudget,
        management: Management,
        ablation: Ablation | None,
        index: EpisodeText,
        *,
        by_cue: bool,
    ) -> None:
        super().__init__(seq, view, budget)
        self._by_cue = by_cue
        self._management = management
        self._ablation = ablation
        self._index = index
        # Corrected numbers in partitions: how many, and by kind.
        self.repairs = 0
        self._repaired: Counter[str] = Counter()
        # The turns at the job's start. Turns deleted meanwhile are forgotten by their own records.
        self._turns: dict[int, TurnView] = {}

    def outcome(self, cluster: tuple[int, ...], settled: tuple[int, ...] = ()) -> PolicyResult:
        """The result, with the number of repairs of partitions."""
        counts = ", ".join(f"{count} {what}" for what, count in self._repaired.items() if count)
        reason = f"the partition was repaired: {counts}" if counts else None
        return PolicyResult(
            Decision.FIRED,
            cluster=cluster,
            settled=settled,
            drafts=tuple(self.drafts),
            reason=reason,
            repairs=self.repairs,
        )

    def parked(
        self, error: Exception, cluster: tuple[int, ...], gone: tuple[Draft, ...] = ()
    ) -> PolicyResult:
        """The result of a failed job. `gone` are deletions that must be made nevertheless."""
        return parked(error, self.operation, cluster, drafts=gone, repairs=self.repairs)

    # ---- episodes (section 3.2)

    def take(self, window: Sequence[MessageRef]) -> Steps:
        """Algorithm 1 for a window: the groups in order, each with the results of those before it."""
        for seq, _ in window:
            self._turns.setdefault(seq, self.view.turn(seq))
        for group in (yield from self._partition(window)):
            if self._ablation == "direct-extraction":
                yield from self.distil_direct(group)
            else:
                yield from self._remember(group)

    def _partition(
        self, window: Sequence[MessageRef]
    ) -> Generator[Effect, Any, list[tuple[MessageRef, ...]]]:
        """The groups of a window (section 3.2.1)."""
        if self._ablation == "fixed-chunks" or len(window) < 2:
            return [tuple(window)] if window else []
        groups: list[tuple[MessageRef, ...]] = []
        for part in self._message_parts(window, partition_prompt):
            reply: PartitionReply = yield from self.ask(partition_prompt(self._lines(part)))
            found = partition_of([group.messages for group in reply.groups], len(part))
            self.repairs += found.repairs
            self._repaired.update(missing=found.missing, repeated=found.repeated, invented=found.invented)
            groups += [tuple(part[n - 1] for n in numbers) for numbers in found.groups]
        return groups

    def _remember(self, group: tuple[MessageRef, ...]) -> Steps:
        """Narrate a group, integrate it into the episode that it continues, and distil facts."""
        told, version = yield from self._narrate(group)
        index_text = self._index_text(group)
        (vector,) = yield Embed((index_text or told,))
        sources = _turns_of(group)
        older = yield from self._continued(told, vector, sources)
        if older is None:
            more = {"source_messages": group, "index_text": index_text}
            draft = self.new("episode", told, vector, sources, version, **more)
            yield from self._learn(draft, group)
            return
        group = (*_messages_in(older, self.view), *group)
        told, version = yield from self._integrate(as_shown(1, older), told, sources)
        draft = yield from self._retold(older, told, version, group)
        yield from self._learn(draft, group)

    def _retold(
        self, older: Memory, told: str, version: str, group: Sequence[MessageRef]
    ) -> Generator[Effect, Any, Draft]:
        """A new version of an episode, of these messages."""
        index_text = self._index_text(group)
        (vector,) = yield Embed((index_text or told,))
        more = {"source_messages": tuple(group), "index_text": index_text}
        return self.revise(older, told, vector, _turns_of(group), version, **more)

    def _index_text(self, group: Sequence[MessageRef]) -> str:
        """The raw messages of an episode, where it is indexed by them (table 6)."""
        if self._index == "narrative":
            return ""
        return "\n".join(self._turn(seq).messages[line] for seq, line in self._present(group))

    def _narrate(self, group: Sequence[MessageRef]) -> Generator[Effect, Any, tuple[str, str]]:
        """Cue and narrative of messages as one text, and the prompt's version; in parts if needed."""
        told = version = ""
        for part in self._message_parts(group, narrate_prompt):
            prompt = narrate_prompt(self._lines(part))
            reply: NarrativeReply = yield from self.ask(prompt)
            text, version = _text_of(reply), prompt.version
            if told:
                earlier = ShownMemory(1, self.latest(_turns_of(group)), told)
                text, version = yield from self._integrate(earlier, text, _turns_of(part))
            told = text
        return told, version

    def _continued(
        self, told: str, vector: Vector, sources: tuple[int, ...]
    ) -> Generator[Effect, Any, Memory | None]:
        """The stored episode that a new one continues, if the LLM selects one of the nearest."""
        found = yield from self.known("episode", vector, CANDIDATE_EPISODES)
        new = ShownMemory(1, self.latest(sources), told)
        prompt, candidates = self.select_fitting(
            [s.memory for s in found], lambda shown: select_prompt(new, self._candidates(shown))
        )
        if not candidates:
            return None
        reply: SelectReply = yield from self.ask(prompt)
        number = reply.continues or 0
        return candidates[number - 1] if 1 <= number <= len(candidates) else None

    def _candidates(self, shown: Sequence[ShownMemory]) -> Sequence[ShownMemory]:
        """The episodes that a new one may continue, by their cues or whole."""
        return [replace(s, text=cue_of(s.text)) for s in shown] if self._by_cue else shown

    def _integrate(
        self, older: ShownMemory, told: str, sources: tuple[int, ...]
    ) -> Generator[Effect, Any, tuple[str, str]]:
        """Two narratives as one text, and the prompt's version."""
        prompt = integrate_prompt([older, ShownMemory(2, self.latest(sources), told)])
        reply: NarrativeReply = yield from self.ask(prompt)
        return _text_of(reply), prompt.version

    # ---- facts (section 3.3)

    def _learn(self, episode: Draft, messages: Sequence[MessageRef]) -> Steps:
        """Predict the episode from known facts, then distil what its raw messages add (section 3.3)."""
        held = self._present(messages)
        if self._ablation == "without-facts" or not held:
            return
        assert episode.vector is not None, "only episodes that exist are learned from"
        known = yield from self._management.evoke(self, episode.vector)
        shown = ShownMemory(1, episode.memory.timestamp, cue_of(episode.memory.text))
        prompt, _ = self.select_fitting(known, lambda facts: predict_prompt(shown, facts))
        guess: PredictionReply = yield from self.ask(prompt)
        prediction = ShownMemory(1, episode.memory.timestamp, guess.prediction)
        yield from self._distil(held, lambda lines: distil_prompt(lines, prediction), episode.memory.id)

    def distil_direct(self, messages: Sequence[MessageRef]) -> Steps:
        """NEMORI-s (section 4.4): distil raw messages without a prediction."""
        if self._ablation != "without-facts":
            yield from self._distil(self._present(messages), distil_direct_prompt, None)

    def _distil(self, messages: Sequence[MessageRef], prompt_of: PromptOf, episode_id: str | None) -> Steps:
        """Facts of raw messages, handed to the management (section 3.3)."""
        for part in self._message_parts(messages, prompt_of):
            lines = self._lines(part)
            words = {ref: telling_words(line.text) for ref, line in zip(part, lines, strict=True)}
            prompt = prompt_of(lines)
            reply: StatementsReply = yield from self.ask(prompt)
            found: dict[str, Statement] = {}
            for draft in reply.facts:
                found.setdefault(draft.text, Statement(draft.text, _said_in(draft, part, words)))
            if found:
                origin = Origin(_turns_of(part), episode_id, prompt.version)
                yield from self._management.consolidate(self, tuple(found.values()), origin)

    # ---- remaking

    def distil_again(self, episode: Memory, turns: Sequence[int]) -> Steps:
        """Distil the messages of these turns in an episode again."""
        messages = [ref for ref in _messages_in(episode, self.view) if ref[0] in turns]
        if messages:
            (vector,) = yield Embed((episode.indexed,))
            yield from self._learn(Draft(episode, vector), messages)

    def remake_episode(self, episode: Memory, lost: Sequence[int]) -> Steps:
        """Narrate an episode again without its deleted turns, and distil its `lost` turns again."""
        group = self._present(_messages_in(episode, self.view))
        if not group:
            self.drafts.append(Draft(forgotten(episode, self.seq), None))
            return
        told, version = yield from self._narrate(group)
        draft = yield from self._retold(episode, told, version, group)
        yield from self._learn(draft, [ref for ref in group if ref[0] in lost])

    def messages_without_episode(self, turns: Sequence[int]) -> tuple[MessageRef, ...]:
        """The messages of these turns that no episode contains."""
        held = {ref for e in self.view.current("episode") for ref in _messages_in(e, self.view)}
        return tuple(ref for ref in messages_of(turns, self.view) if ref not in held)

    def deleted_messages(self) -> frozenset[MessageRef]:
        """The messages of the episodes that a user has deleted."""
        return frozenset(ref for e in self.view.ended("episode") for ref in _messages_in(e, self.view))

    # ---- messages

    def _turn(self, seq: int) -> TurnView:
        return self._turns.get(seq) or self.view.turn(seq)

    def _present(self, messages: Sequence[MessageRef]) -> tuple[MessageRef, ...]:
        """The messages that were not deleted."""
        kept = [ref for ref in messages if ref[0] in self._turns or self.view.exists(ref[0])]
        return tuple((seq, line) for seq, line in kept if line < len(self._turn(seq).messages))

    def _lines(self, messages: Sequence[MessageRef]) -> list[ShownTurn]:
        said = [(self._turn(seq), line) for seq, line in messages]
        return [ShownTurn(n, turn.timestamp, turn.messages[line]) for n, (turn, line) in enumerate(said, 1)]

    def _message_parts(
        self, messages: Sequence[MessageRef], prompt_of: PromptOf
    ) -> list[Sequence[MessageRef]]:
        """The messages split into as few prompts as possible, in order. PromptTooLong if one is too long."""
        parts = self.parts(
            range(len(messages)), lambda places: prompt_of(self._lines([messages[n] for n in places]))
        )
        return [[messages[n] for n in part] for part in parts]


def _messages_in(episode: Memory, view: MemoryView) -> tuple[MessageRef, ...]:
    """The messages of an episode; all messages of its turns if it does not name them."""
    return episode.source_messages or messages_of(episode.source_seqs, view)


def _turns_of(messages: Sequence[MessageRef]) -> tuple[int, ...]:
    return tuple(sorted({seq for seq, _ in messages}))


def _said_in(
    draft: StatementDraft, shown: Sequence[MessageRef], words: Mapping[MessageRef, frozenset[str]]
) -> tuple[int, ...]:
    """The turns of the messages that say a fact; the oldest where the reply names none."""
    messages = named(draft.messages, shown, otherwise=[min(shown)])
    return _turns_of(turns_that_say(telling_words(draft.text), messages, words))


def cue_of(text: str) -> str:
    """The cue of an episode, its first line."""
    return text.partition("\n")[0]


def _text_of(reply: NarrativeReply) -> str:
    """An episode as it is stored and embedded: the cue is its first line."""
    return f"{' '.join(reply.cue.split())}\n{reply.narrative}"
