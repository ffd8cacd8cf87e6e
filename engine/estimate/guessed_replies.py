"""What an LLM is taken to reply to the prompts of NEMORI and HiMem: their own words, of guessed number."""

from __future__ import annotations

import json
from collections.abc import Sequence

from undertow.engine.estimate.reply_guess import Evenly, ReplyGuess, stand_in
from undertow.prompts.builders import Prompt
from undertow.prompts.reply_schemas import (
    CANDIDATES,
    IMPLIED_NOTES,
    STATED_NOTES,
    AlignReply,
    ConsolidateReply,
    MessageGroup,
    NarrativeReply,
    NoteChange,
    NoteDraft,
    NotesReply,
    PartitionReply,
    PredictionReply,
    Reply,
    SegmentDraft,
    SegmentReply,
    SelectReply,
    StatementDraft,
    StatementsReply,
    SummaryReply,
    TraitDraft,
    TraitsReply,
)

# 10 to 20 words; a few words; one to three sentences
CUE_CHARS, TOPIC_CHARS, EPISODE_SUMMARY_CHARS = 90, 40, 200
# 450 words: an integrated episode, or the one summary of all facts
LONGEST_CHARS = 2_700
MESSAGES_PER_TURN = 2
MOST_EPISODES = 12

Texts = Sequence[str]


class GuessedReplies:
    """The replies of one run over any number of tenants. No fact is ever like a stored one."""

    def __init__(self, guess: ReplyGuess) -> None:
        self._guess = guess
        self._topics = Evenly(1 / guess.topic_messages)
        self._continued = Evenly(guess.continued_share)
        self._facts = Evenly(guess.facts_per_message)
        self._notes = Evenly(guess.notes_per_turn)
        self._traits = Evenly(guess.traits)
        self._aligned = Evenly(guess.aligned_share)
        self._sentences = 0

    def to(self, prompt: Prompt) -> Reply:
        """The reply to a prompt. ValueError: one that no window is made into memories with."""
        shown = shown_in(prompt.user)
        match prompt.operation:
            case "partition":
                return self._partition(shown["Messages"])
            case "narrate":
                return _narrative(shown["Messages"], self._guess.narrative_chars)
            case "select":
                candidates = len(shown["Stored episodes"])  # the last one: of the window before
                return SelectReply(continues=candidates if self._continued.take() else None)
            case "integrate":
                return _narrative(shown["Episodes"], _joined_chars(shown["Episodes"]))
            case "predict":
                known = [*shown["Cue"], *shown.get("Stored facts", ())]
                return PredictionReply(prediction=stand_in(known, self._guess.prediction_chars))
            case "distil" | "distil_direct":
                count = self._facts.take(len(shown["Messages"]))
                facts = self._of(shown["Messages"], min(count, CANDIDATES))
                return StatementsReply(facts=[StatementDraft(messages=[1], text=text) for text in facts])
            case "consolidate":
                return ConsolidateReply(action="new", targets=[], text="")
            case "summarise":
                known = [*shown.get("Summary", ()), *shown["New facts"]]
                return SummaryReply(summary=stand_in(known, _joined_chars(known)))
            case "segment":
                return self._segment(shown["Turns"])
            case "notes":
                return self._stated(shown["Turns"])
            case "traits":
                return self._implied(shown["Turns"])
            case "align":
                return self._align(shown["Notes"])
        raise ValueError(f"no reply to {prompt.operation} is guessed")

    def _partition(self, messages: Texts) -> PartitionReply:
        groups = [MessageGroup(messages=list(numbers)) for numbers in self._cut(len(messages), 1)]
        return PartitionReply(groups=groups)

    def _segment(self, turns: Texts) -> SegmentReply:
        topic, summary = stand_in(turns, TOPIC_CHARS), stand_in(turns, EPISODE_SUMMARY_CHARS)
        firsts = [numbers[0] for numbers in self._cut(len(turns), MESSAGES_PER_TURN)]
        drafts = [SegmentDraft(first=first, topic=topic, summary=summary) for first in firsts]
        return SegmentReply(episodes=drafts[:MOST_EPISODES])

    def _stated(self, turns: Texts) -> NotesReply:
        texts = self._of(turns, min(self._notes.take(len(turns)), STATED_NOTES))
        places = [1 + n % len(turns) for n in range(len(texts))]
        drafts = [NoteDraft(text=t, kind="fact", turns=[n]) for t, n in zip(texts, places, strict=True)]
        return NotesReply(notes=drafts)

    def _implied(self, turns: Texts) -> TraitsReply:
        """Of two turns each, as several words are to bear a trait out."""
        resting = [1, len(turns)]
        texts = self._of(turns, min(self._traits.take(), IMPLIED_NOTES))
        return TraitsReply(notes=[TraitDraft(text=t, kind="preference", turns=resting) for t in texts])

    def _align(self, notes: Texts) -> AlignReply:
        """Other words for the first ones, as long as they were."""
        count = min(self._aligned.take(len(notes)), STATED_NOTES + IMPLIED_NOTES)
        changed = enumerate(notes[:count], 1)
        texts = [(n, stand_in([note], self._guess.fact_chars)) for n, note in changed]
        return AlignReply(changes=[NoteChange(note=n, same_as=None, text=text) for n, text in texts])

    def _cut(self, count: int, messages_each: int) -> list[range]:
        """The numbers 1 to `count` in as many runs as there are topics."""
        runs = max(1, min(count, self._topics.take(count * messages_each)))
        starts = [1 + n * count // runs for n in range(runs)]
        return [range(start, end) for start, end in zip(starts, [*starts[1:], count + 1], strict=True)]

    def _of(self, texts: Texts, count: int) -> list[str]:
        """Sentences of these texts in turn, no two alike."""
        found = []
        for n in range(count):
            self._sentences += 1
            found.append(stand_in([str(self._sentences), texts[n % len(texts)]], self._guess.fact_chars))
        return found


def shown_in(user: str) -> dict[str, list[str]]:
    """The texts that a user message shows, by heading, in order; no entry for a heading without any."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in user.split("\n"):
        if line.startswith("["):
            _, _, text = json.loads(line)
            found.setdefault(heading, []).append(text)
        else:
            heading = line.removesuffix(":")
    return found


def _narrative(texts: Texts, chars: int) -> NarrativeReply:
    return NarrativeReply(cue=stand_in(texts, CUE_CHARS), narrative=stand_in(texts, chars))


def _joined_chars(texts: Texts) -> int:
    return min(sum(map(len, texts)), LONGEST_CHARS)
