"""HiMem's episodes: one pass cuts a dialogue window, and each piece is kept verbatim (section 2.2.1)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from undertow.engine.policies.base import Complete, Effect, Embed, PromptBudget
from undertow.engine.policies.himem.notes import Note, aligned_notes
from undertow.engine.policies.work import Steps, Work, apart
from undertow.prompts.builders import UNDATED, ShownTurn, prompt_version, segment_prompt
from undertow.prompts.reply_schemas import SegmentDraft, SegmentReply

# of the room that a prompt has for material, how much one window may take
WINDOW_SHARE = 0.5


def has_room(turns: Sequence[ShownTurn], budget: PromptBudget) -> bool:
    """Whether these may be one window.

    On one topic it becomes one episode, with all of its words: the prompts that judge it, answer from it and
    add to the notes by it must have room for it, the question, and what else was found.
    """
    fixed_tokens = segment_prompt(()).size_tokens
    taken_tokens = segment_prompt(turns).size_tokens - fixed_tokens
    return taken_tokens <= WINDOW_SHARE * (budget.prompt_tokens - fixed_tokens)


def write_episodes(work: Work, window: Sequence[int], *, align: bool) -> Steps:
    """The episodes of these turns, in parts where one prompt does not hold them. PromptTooLong."""
    for part in work.parts(window, lambda seqs: segment_prompt(work.turns(seqs))):
        prompt = segment_prompt(work.turns(part))
        reply: SegmentReply = yield Complete(prompt)
        pieces = [(part[at.start : at.stop], draft) for at, draft in cut(reply.episodes, len(part))]
        texts = []
        for seqs, draft in pieces:
            said = [work.view.turn(s).text for s in seqs]
            if align:
                said = yield from _aligned(work, seqs, said)
            texts.append("\n".join([f"{draft.topic} ({span(work, seqs)})", draft.summary, *said]))
        vectors = yield Embed(tuple(texts))
        for (seqs, _), text, vector in zip(pieces, texts, vectors, strict=True):
            # topic and summary were written in sight of all of the window
            beside = apart(part, seqs)
            work.new("episode", text, vector, tuple(seqs), prompt.version, shown_seqs=beside)


def cut(drafts: Sequence[SegmentDraft], count: int) -> list[tuple[range, SegmentDraft]]:
    """Where a window of `count` turns is cut: contiguous places from 0 that hold each turn once, in order.

    An episode ends where the next begins, so any reply gives such a cut: of two with one beginning the first
    counts, numbers that name no turn are left out, and the earliest episode reaches back to the first turn.
    """
    named = {d.first: d for d in reversed(drafts) if 1 <= d.first <= count} or {1: drafts[0]}
    starts = [0, *sorted(first - 1 for first in named)[1:]]
    places = [range(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]
    return list(zip(places, (named[first] for first in sorted(named)), strict=True))


def span(work: Work, seqs: Sequence[int]) -> str:
    """From when to when these turns were said."""
    times = [time for s in work.by_time(seqs) if (time := work.view.turn(s).timestamp) is not None]
    ends = dict.fromkeys((times[0], times[-1])) if times else {UNDATED: None}
    return " to ".join(ends)


def _aligned(work: Work, seqs: Sequence[int], said: Sequence[str]) -> Generator[Effect, Any, list[str]]:
    """The turns' words with names and dates settled: an ablation, which the paper found to do harm."""
    version = prompt_version("align")
    notes = [Note(text, "", (seq,), version) for seq, text in zip(seqs, said, strict=True)]
    aligned = yield from aligned_notes(work, (), notes)
    return [note.text for note in aligned]
