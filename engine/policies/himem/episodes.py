"""HiMem's episodes: one pass segments a dialogue window; each segment is kept verbatim (section 2.2.1)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from undertow.engine.policies.base import Complete, Effect, Embed, PromptBudget
from undertow.engine.policies.himem.notes import Note, aligned_notes
from undertow.engine.policies.work import Steps, Work, only_shown
from undertow.prompts.builders import UNDATED, ShownTurn, prompt_version, segment_prompt
from undertow.prompts.reply_schemas import SegmentDraft, SegmentReply

# The largest share of a prompt's room for one window.
WINDOW_SHARE = 0.5


def has_room(turns: Sequence[ShownTurn], budget: PromptBudget) -> bool:
    """Whether these turns may be one window.

    A window on one topic becomes one verbatim episode. Later prompts must have room for it, the question, and
    the other results.
    """
    fixed_tokens = segment_prompt(()).size_tokens
    taken_tokens = segment_prompt(turns).size_tokens - fixed_tokens
    return taken_tokens <= WINDOW_SHARE * (budget.prompt_tokens - fixed_tokens)


def write_episodes(work: Work, window: Sequence[int], *, align: bool) -> Steps:
    """Write the episodes of these turns, in parts if one prompt is too short. PromptTooLong."""
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
            # Topic and summary were written with the whole window in the prompt.
            beside = only_shown(part, seqs)
            work.new("episode", text, vector, tuple(seqs), prompt.version, shown_seqs=beside)


def cut(drafts: Sequence[SegmentDraft], count: int) -> list[tuple[range, SegmentDraft]]:
    """The segments of a window of `count` turns: contiguous ranges from 0 that cover each turn once.

    An episode ends where the next begins, so any reply gives a segmentation. Of two drafts with the same
    first turn the first counts, invalid numbers are ignored, and the earliest episode starts at the first
    turn.
    """
    named = {d.first: d for d in reversed(drafts) if 1 <= d.first <= count} or {1: drafts[0]}
    starts = [0, *sorted(first - 1 for first in named)[1:]]
    places = [range(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]
    return list(zip(places, (named[first] for first in sorted(named)), strict=True))


def span(work: Work, seqs: Sequence[int]) -> str:
    """The time span of these turns, for an episode's header."""
    times = [time for s in work.by_time(seqs) if (time := work.view.turn(s).timestamp) is not None]
    ends = dict.fromkeys((times[0], times[-1])) if times else {UNDATED: None}
    return " to ".join(ends)


def _aligned(work: Work, seqs: Sequence[int], said: Sequence[str]) -> Generator[Effect, Any, list[str]]:
    """The turns' text after knowledge alignment: an ablation that the paper found harmful (table 3)."""
    version = prompt_version("align")
    notes = [Note(text, "", (seq,), version) for seq, text in zip(seqs, said, strict=True)]
    aligned = yield from aligned_notes(work, (), notes)
    return [note.text for note in aligned]
