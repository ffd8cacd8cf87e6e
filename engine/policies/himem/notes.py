"""HiMem's notes in three stages: explicit facts, implied traits, and their alignment (section 2.2.2).

A note is stored as a fact whose `fact_kind` is fact, preference or profile. Its episodes are those that
contain its source turns. No two episodes share a turn, so they are unambiguous; `episode_id` holds the first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Complete, Draft, Effect, Embed, Vector, cosine, deletion
from undertow.engine.policies.work import Steps, Work, only_shown
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    align_prompt,
    notes_all_prompt,
    notes_prompt,
    traits_prompt,
)
from undertow.prompts.reply_schemas import (
    AlignReply,
    NoteChange,
    NoteDraft,
    NotesAllReply,
    NotesReply,
    TraitDraft,
    TraitsReply,
)

T = TypeVar("T")
# the calls that write notes: 3, one a stage; 2, without alignment; 1, all stages at once
NoteCalls = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Note:
    """A note between the stages. `sources`, and the turns also `shown`, are seqs, ascending."""

    text: str
    kind: str
    sources: tuple[int, ...]
    version: str
    shown: tuple[int, ...] = ()


def write_notes(work: Work, turns: Sequence[int], calls: NoteCalls) -> Steps:
    """Write the notes of these turns. PromptTooLong."""
    for part in work.parts(turns, lambda seqs: _stated_prompt(work, seqs, calls)):
        notes = yield from _written(work, part, calls)
        yield from _store(work, notes)


def restore_notes(work: Work, turns: Sequence[int], lost: Sequence[Memory], calls: NoteCalls) -> Steps:
    """Write those notes of these turns again that were `lost`; the others stay. PromptTooLong.

    Without lost notes to compare with (a parked deletion has removed their text), turns that have notes get
    no new ones: they would be duplicates.
    """
    if not lost and any(note.reach.intersection(turns) for note in work.current("fact")):
        return
    notes: list[Note] = []
    for part in work.parts(turns, lambda seqs: _stated_prompt(work, seqs, calls)):
        notes += yield from _written(work, part, calls)
    if lost and notes:
        notes = yield from _in_place_of(work, lost, notes)
    yield from _store(work, notes)


def _in_place_of(
    work: Work, lost: Sequence[Memory], notes: Sequence[Note]
) -> Generator[Effect, Any, list[Note]]:
    """The nearest new note for each lost one, unless a remaining note is nearer to the new one."""
    wanted = yield Embed(tuple(note.text for note in lost))
    vectors = yield Embed(tuple(note.text for note in notes))
    said = {note.text for note in work.current("fact")}
    found: dict[int, Note] = {}
    for vector in wanted:
        nth = max(range(len(notes)), key=lambda n: cosine(vector, vectors[n]))
        nearest = yield from work.known("fact", vectors[nth], 1)
        doubles = any(known.score >= cosine(vector, vectors[nth]) for known in nearest)
        if notes[nth].text in said or not doubles:
            found[nth] = notes[nth]
    return list(found.values())


def _written(work: Work, part: Sequence[int], calls: NoteCalls) -> Generator[Effect, Any, list[Note]]:
    """All stages for turns that fit into one prompt."""
    notes = yield from _stated(work, part, calls)
    if calls > 1:
        notes += yield from _implied(work, part, notes)
    if calls == 3 and notes:
        notes = yield from aligned_notes(work, part, notes)
    return [replace(note, shown=only_shown(part, note.sources)) for note in notes]


def _stated_prompt(work: Work, part: Sequence[int], calls: NoteCalls) -> Prompt:
    turns = work.turns(part)
    return notes_all_prompt(turns) if calls == 1 else notes_prompt(turns)


def _stated(work: Work, part: Sequence[int], calls: NoteCalls) -> Generator[Effect, Any, list[Note]]:
    """Stage 1: what the turns say explicitly; with one call, all stages."""
    prompt = _stated_prompt(work, part, calls)
    reply: NotesReply | NotesAllReply = yield Complete(prompt)
    return [_note(work, draft, part, prompt) for draft in reply.notes]


def _implied(work: Work, part: Sequence[int], stated: Sequence[Note]) -> Generator[Effect, Any, list[Note]]:
    """Stage 2: traits that the turns imply."""
    prompt = shortened(work, stated, lambda notes: traits_prompt(work.turns(part), _shown(work, notes)))
    reply: TraitsReply = yield Complete(prompt)
    return [_note(work, draft, part, prompt) for draft in reply.notes]


def aligned_notes(
    work: Work, part: Sequence[int], notes: Sequence[Note]
) -> Generator[Effect, Any, list[Note]]:
    """Stage 3: alignment, with as many of the turns in `part` as fit into the prompt."""
    prompt = shortened(work, part, lambda seqs: align_prompt(work.turns(seqs), _shown(work, notes)))
    reply: AlignReply = yield Complete(prompt)
    return settled(notes, reply.changes, prompt.version)


def settled(notes: Sequence[Note], changes: Sequence[NoteChange], version: str) -> list[Note]:
    """The notes after the changes. Notes without a valid change stay as they are.

    A duplicate note is dropped, and the other gains its sources. Of several changes of one note the first
    counts, and of notes that are duplicates of each other one stays.
    """
    kept = dict(enumerate(notes, 1))
    first = {change.note: change for change in reversed(changes) if change.note in kept}
    for number, change in sorted(first.items()):
        if change.text:
            kept[number] = replace(kept[number], text=change.text, version=version)
    for number, change in sorted(first.items()):
        if change.same_as is not None and change.same_as != number and change.same_as in kept:
            gone, into = kept.pop(number), kept[change.same_as]
            sources = tuple(sorted({*into.sources, *gone.sources}))
            kept[change.same_as] = replace(into, sources=sources)
    return list(kept.values())


def _store(work: Work, notes: Sequence[Note]) -> Steps:
    """Store each note as a memory. A verbatim repeat only adds sources."""
    if not notes:
        return
    vectors = yield Embed(tuple(note.text for note in notes))
    known = {memory.text: memory for memory in work.current("fact")}
    for note, vector in zip(notes, vectors, strict=True):
        if (same := known.get(note.text)) is not None:
            known[note.text] = work.add_sources(same, note.sources, vector)
            continue
        known[note.text] = add_note(work, note, vector).memory


def add_note(work: Work, note: Note, vector: Vector, supersedes: tuple[str, ...] = ()) -> Draft:
    """Add a new note."""
    return work.new(
        "fact",
        note.text,
        vector,
        note.sources,
        note.version,
        episode_id=episode_of(work, note.sources[0]),
        fact_kind=note.kind,
        supersedes=supersedes,
        shown_seqs=note.shown,
    )


def forget_least_used(work: Work, most: int) -> int:
    """Delete the least used notes above `most`. Returns their number. History, turns and episodes stay.

    Notes used by the fewest answers go first, the oldest first among equals. Notes of this job go last: they
    have had no chance to be used.
    """
    uses = work.view.uses()
    notes = sorted(
        work.current("fact"),
        key=lambda n: (n.made_at_seq == work.seq, uses.get(n.id, 0), n.born_at_seq, n.ordinal),
    )
    gone = notes[: max(0, len(notes) - most)]
    work.drafts += [Draft(deletion(note, work.seq), None) for note in gone]
    return len(gone)


def episode_of(work: Work, seq: int) -> str | None:
    """The episode that contains a turn. None: a user has deleted it."""
    holding = (episode.id for episode in work.current("episode") if seq in episode.source_seqs)
    return next(holding, None)


def shortened(work: Work, items: Sequence[T], prompt_of: Callable[[Sequence[T]], Prompt]) -> Prompt:
    """The prompt with as many of the last items as fit. PromptTooLong: too long even without items."""
    while items and not work.fits(prompt_of(items)):
        items = items[1:]
    return work.checked(prompt_of(items))


def _note(work: Work, draft: NoteDraft | TraitDraft, part: Sequence[int], prompt: Prompt) -> Note:
    return Note(draft.text, draft.kind, work.saying(draft.text, draft.turns, part), prompt.version)


def _shown(work: Work, notes: Sequence[Note]) -> list[ShownMemory]:
    return [ShownMemory(n, work.latest(note.sources), note.text) for n, note in enumerate(notes, 1)]
