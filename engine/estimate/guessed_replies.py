"""The assumed replies to the prompts of all policies: words of the shown material, in guessed number."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from undertow.engine.estimate.assumptions import SENTENCE_CHARS, Assumptions, Evenly, stand_in
from undertow.prompts.builders import Prompt
from undertow.prompts.operations import FUSED, REPLIES
from undertow.prompts.reply_schemas import (
    CANDIDATES,
    IMPLIED_NOTES,
    PERSONA_LINES,
    REFINED_FACTS,
    STATED_NOTES,
    Reply,
)

# 10 to 20 words; a few words; one to three sentences
CUE_CHARS, TOPIC_CHARS, EPISODE_SUMMARY_CHARS = 90, 40, 200
# 450 words: an integrated episode, or the one summary of all facts
LONGEST_CHARS = 2_700
KEYWORD, KEYWORDS, TAGS, TOPIC_WORDS = "pottery", 4, 3, 5
MESSAGES_PER_TURN = 2
MOST_EPISODES = 12  # of one `segment`
MOST_SALIENT = 16  # facts of one `salient`
MOST_NUMBERS = 100  # turns that an episode names

Texts = Sequence[str]
Shown = dict[str, list[str]]  # texts by heading
Fields = dict[str, Any]


class _Parts:
    """The parts of replies: counts as assumed, and texts of the right length."""

    def __init__(self, assumed: Assumptions, on_text: Callable[[str, Texts], None] = lambda *_: None) -> None:
        """`on_text` receives each text that is written, and the shown texts that it is made of."""
        self._assumed = assumed
        self._on_text = on_text
        means = asdict(assumed) | {"topics": 1 / assumed.topic_messages}
        self._counts = {name: Evenly(mean) for name, mean in means.items()}
        self._sentences = 0

    def _take(self, name: str, times: int = 1) -> int:
        return self._counts[name].take(times)

    def _write(self, texts: Texts, chars: float) -> str:
        text = stand_in(texts, chars).strip()
        self._on_text(text, texts)
        return text

    def _facts(self, texts: Texts, count: int) -> list[str]:
        """Sentences made of these texts in turn. A number tells them apart."""
        found = []
        for n in range(count):
            self._sentences += 1
            source = texts[n % len(texts)]
            text = stand_in([str(self._sentences), source], self._assumed.fact_chars).strip()
            self._on_text(text, [source])
            found.append(text)
        return found

    def _narrative(self, texts: Texts, chars: float) -> Fields:
        return {"narrative": self._write(texts, chars), "cue": self._write(texts, CUE_CHARS)}

    def _cut(self, count: int, messages_each: int) -> list[range]:
        """The numbers 1 to `count` in as many runs as there are topics."""
        runs = max(1, min(count, self._take("topics", count * messages_each)))
        starts = [1 + n * count // runs for n in range(runs)]
        return [range(start, end) for start, end in zip(starts, [*starts[1:], count + 1], strict=True)]


class GuessedReplies(_Parts):
    """The replies of one run over any number of tenants. No two facts are alike."""

    def to(self, prompt: Prompt) -> Reply:
        """The reply to a prompt. ValueError: a prompt that makes no memories of turns."""
        reply = getattr(self, f"_{_name_of(prompt)}", None)
        if reply is None or prompt.reply is None:
            raise ValueError(f"no reply to {prompt.operation} is guessed")
        return prompt.reply.model_validate(reply(shown_in(prompt.user)))

    # ---- RecMem, and the eager policy

    def _episode(self, shown: Shown) -> Fields:
        turns, numbers = shown["Turns"], range(1, min(len(shown["Turns"]), MOST_NUMBERS) + 1)
        n = self._take("episodes_per_fire")
        parts = [(turns[i::n] or turns, numbers[i::n]) for i in range(n)]
        chars = self._assumed.episode_chars
        return {"episodes": [{"text": self._write(texts, chars), "turns": [*own]} for texts, own in parts]}

    def _episode_facts(self, shown: Shown) -> Fields:
        """As many facts for each episode as one `refine` would find."""
        told = self._episode(shown)["episodes"]
        return {"episodes": [{**episode, **self._refine(shown)} for episode in told]}

    def _merge_facts(self, shown: Shown) -> Fields:
        told = self._merge(shown)
        facts = self._refine({"Turns": shown["New turn"], **shown}) if told["same_story"] else {"facts": []}
        return {**told, **facts}

    def _merge(self, shown: Shown) -> Fields:
        (old,), (turn,) = shown["Stored episode"], shown["New turn"]
        if not self._take("merge_share"):
            return {"same_story": False, "narrative": ""}
        chars = min(len(old) + SENTENCE_CHARS, self._assumed.merged_chars)
        return {"same_story": True, "narrative": self._write([old, turn], chars)}

    def _refine(self, shown: Shown) -> Fields:
        return self._facts_of(shown["Turns"], min(self._take("facts"), REFINED_FACTS))

    def _salient(self, shown: Shown) -> Fields:
        turns = shown["Turns"]
        return self._facts_of(turns, min(self._take("notes_per_turn", len(turns)), MOST_SALIENT))

    def _facts_of(self, turns: Texts, count: int) -> Fields:
        texts = self._facts(turns, count)
        like = {"kind": "user_event", "replaces": None}
        return {"facts": [{"text": t, "turns": [1 + n % len(turns)], **like} for n, t in enumerate(texts)]}

    _direct = _refine

    def _extract(self, shown: Shown) -> Fields:
        texts = self._facts(shown["New turn"], min(self._take("facts"), CANDIDATES))
        return {"facts": [{"text": text} for text in texts]}

    def _reconcile(self, shown: Shown) -> Fields:
        """A candidate that is not added updates a stored fact with its words."""
        decisions: list[Fields] = []
        for number, text in enumerate(shown["Candidates"], 1):
            added = self._take("added_share") > 0
            change: Fields = {"action": "add", "fact": None, "text": ""}
            if not added:
                fact = 1 + number % len(shown["Stored facts"])
                change = {"action": "update", "fact": fact, "text": self._write([text], len(text))}
            decisions.append({"candidate": number, **change})
        return {"decisions": decisions}

    # ---- NEMORI

    def _partition(self, shown: Shown) -> Fields:
        cuts = self._cut(len(shown["Messages"]), 1)
        return {"groups": [{"messages": list(numbers)} for numbers in cuts]}

    def _narrate(self, shown: Shown) -> Fields:
        return self._narrative(shown["Messages"], self._assumed.narrative_chars)

    def _select(self, shown: Shown) -> Fields:
        return {"continues": len(shown["Stored episodes"]) if self._take("continued_share") else None}

    def _integrate(self, shown: Shown) -> Fields:
        return self._narrative(shown["Episodes"], _joined_chars(shown["Episodes"]))

    def _predict(self, shown: Shown) -> Fields:
        known = [*shown["Cue"], *shown.get("Stored facts", ())]
        return {"prediction": self._write(known, self._assumed.prediction_chars)}

    def _distil(self, shown: Shown) -> Fields:
        messages = shown["Messages"]
        texts = self._facts(messages, min(self._take("facts_per_message", len(messages)), CANDIDATES))
        return {"facts": [{"messages": [1], "text": text} for text in texts]}

    _distil_direct = _distil

    def _consolidate(self, shown: Shown) -> Fields:
        return {"action": "new", "targets": [], "text": ""}

    def _consolidate_all(self, shown: Shown) -> Fields:
        return {"decisions": []}

    def _summarise(self, shown: Shown) -> Fields:
        known = [*shown.get("Summary", ()), *shown["New facts"]]
        return {"summary": self._write(known, _joined_chars(known))}

    # ---- HiMem

    def _segment(self, shown: Shown) -> Fields:
        turns = shown["Turns"]
        topic, summary = self._write(turns, TOPIC_CHARS), self._write(turns, EPISODE_SUMMARY_CHARS)
        cuts = self._cut(len(turns), MESSAGES_PER_TURN)[:MOST_EPISODES]
        return {"episodes": [{"first": cut[0], "topic": topic, "summary": summary} for cut in cuts]}

    def _notes(self, shown: Shown) -> Fields:
        turns = shown["Turns"]
        texts = self._facts(turns, min(self._take("notes_per_turn", len(turns)), STATED_NOTES))
        numbered = enumerate(texts)
        return {"notes": [{"text": t, "kind": "fact", "turns": [1 + n % len(turns)]} for n, t in numbered]}

    def _notes_all(self, shown: Shown) -> Fields:
        return {"notes": [*self._notes(shown)["notes"], *self._traits(shown)["notes"]]}

    def _traits(self, shown: Shown) -> Fields:
        """Each trait rests on two turns, as more than one message should support it."""
        turns = shown["Turns"]
        texts = self._facts(turns, min(self._take("traits"), IMPLIED_NOTES))
        return {"notes": [{"text": t, "kind": "preference", "turns": [1, len(turns)]} for t in texts]}

    def _align(self, shown: Shown) -> Fields:
        """Rewords the first notes, without changing their length."""
        notes = shown["Notes"]
        count = min(self._take("aligned_share", len(notes)), STATED_NOTES + IMPLIED_NOTES)
        texts = [self._write([note], self._assumed.fact_chars) for note in notes[:count]]
        return {"changes": [{"note": n, "same_as": None, "text": text} for n, text in enumerate(texts, 1)]}

    # ---- A-Mem

    def _annotate(self, shown: Shown) -> Fields:
        context = self._write(shown["Message"], self._assumed.fact_chars)
        return {"keywords": [KEYWORD] * KEYWORDS, "tags": [KEYWORD] * TAGS, "context": context}

    def _connect(self, shown: Shown) -> Fields:
        """The nearest notes are linked, and change."""
        new, known = shown["New note"], shown["Stored notes"]
        links = range(1, 1 + min(self._take("links"), len(known)))
        evolved = enumerate(known[: self._take("evolved")], 1)
        changes = [{"note": n, **self._annotate({"Message": [note, *new]})} for n, note in evolved]
        return {"links": [*links], "evolved": changes}

    # ---- MemoryOS

    def _topic(self, shown: Shown) -> Fields:
        """The longest words are the keywords: what pages share of them is theirs."""
        texts = [*shown.get("Stored summary", ()), *shown["Turns"]]
        words = {word for word in " ".join(texts).split() if word.isalpha()}
        longest = sorted(words, key=lambda word: (-len(word), word))[:TOPIC_WORDS]
        summary = self._write(texts, self._assumed.topic_chars)
        return {"summary": summary or "none", "keywords": [word[:30] for word in longest]}

    def _persona(self, shown: Shown) -> Fields:
        turns = shown["Turns"]
        texts = self._facts(turns, min(self._take("persona_lines"), PERSONA_LINES))
        numbered = enumerate(texts)
        like = {"kind": "knowledge", "replaces": None}
        return {"lines": [{"text": t, "turns": [1 + n % len(turns)], **like} for n, t in numbered]}


def _name_of(prompt: Prompt) -> str:
    """The prompt's name, by its reply: that of a fused one is not its operation's."""
    return next((name for name in FUSED if prompt.reply is REPLIES[name]), prompt.operation)


def shown_in(user: str) -> Shown:
    """The texts that a user message shows, by heading, in order; no entry for a heading without any."""
    found: Shown = {}
    heading = ""
    for line in user.split("\n"):
        if line.startswith("["):
            _, _, text, *_ = json.loads(line)
            found.setdefault(heading, []).append(text)
        else:
            heading = line.removesuffix(":")
    return found


def _joined_chars(texts: Texts) -> int:
    return min(sum(map(len, texts)), LONGEST_CHARS)
