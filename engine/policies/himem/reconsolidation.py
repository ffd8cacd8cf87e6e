"""HiMem's reconsolidation: notes that a question missed are extracted from episodes (section 2.4).

The relation of a candidate to the stored notes decides: independent adds a note; extendable makes a new
version of one; contradictory deletes one, whose history stays, and adds its successor. The statement said
last wins, by the turns of the episodes that say it, which are its sources. The turns of the other shown
episodes are recorded too: their words may be in the note, which must then be deleted with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Complete, Draft, Embed, Vector, deletion
from undertow.engine.policies.himem.notes import Note, add_note
from undertow.engine.policies.work import Steps, Work, listed, named, only_shown
from undertow.prompts.builders import Prompt, ShownMemory, prompt_version, revise_prompt, supplement_prompt
from undertow.prompts.reply_schemas import ReviseReply, Revision, SupplementDraft, SupplementReply

# For each candidate, as many as the eager policy shows.
SIMILAR_NOTES = 10

_INDEPENDENT = Revision(candidate=1, relation="independent", note=None, text="")


def revise_notes(work: Work, question: str, episodes: Sequence[Memory]) -> Steps:
    """Extract what the question missed, compare it with the notes, and revise them. PromptTooLong.

    `episodes`: most relevant first; those that do not fit into the context are left out.
    """
    shown = work.fitting(episodes, lambda some: _prompt(question, some)) or list(episodes[:1])
    prompt = work.checked(_prompt(question, shown))
    reply: SupplementReply = yield Complete(prompt)
    found: dict[str, Note] = {}
    for draft in reply.notes:
        found.setdefault(draft.text, _note(draft, shown, prompt.version))
    if not found:
        return
    vectors = yield Embed(tuple(found))
    given = dict(zip(found, vectors, strict=True))
    for memory in work.current("fact"):
        if memory.text in found:
            work.add_sources(memory, found.pop(memory.text).sources, given[memory.text])
    if found:
        yield from _compare(work, list(found.values()), given)


def _compare(work: Work, candidates: Sequence[Note], given: dict[str, Vector]) -> Steps:
    """Compare the candidates with the nearest notes, in halves if the prompt is too long for all."""
    known = yield from work.near_facts((given[note.text] for note in candidates), SIMILAR_NOTES)
    decisions: Sequence[Revision] = ()
    if known:
        prompt = revise_prompt(
            [ShownMemory(n, work.latest(note.sources), note.text) for n, note in enumerate(candidates, 1)],
            listed(known),
        )
        if len(candidates) > 1 and not work.fits(prompt):
            half = len(candidates) // 2
            yield from _compare(work, candidates[:half], given)
            yield from _compare(work, candidates[half:], given)
            return
        reply: ReviseReply = yield Complete(work.checked(prompt))
        decisions = reply.decisions
    yield from _apply(work, candidates, known, decisions, given)


def _apply(
    work: Work,
    candidates: Sequence[Note],
    known: Sequence[Memory],
    decisions: Sequence[Revision],
    given: dict[str, Vector],
) -> Steps:
    """Carry out the decisions in the candidates' order.

    A candidate is added if it has no decision, or if its decision names no shown note or one that an earlier
    decision has changed. One that contradicts a later statement is dropped: it is outdated, and its episode
    still has it.
    """
    first = {decision.candidate: decision for decision in reversed(decisions)}
    left = dict(enumerate(known, 1))
    for nth, note in enumerate(candidates, 1):
        decision = first.get(nth, _INDEPENDENT)
        old = left.get(decision.note or 0) if decision.relation != "independent" else None
        if old is not None and decision.relation == "extendable":
            del left[decision.note or 0]
            text = decision.text or note.text
            (vector,) = yield Embed((text,))
            sources = tuple(sorted({*old.source_seqs, *note.sources}))
            beside = only_shown({*old.shown_seqs, *note.shown}, sources)
            work.revise(old, text, vector, sources, prompt_version("revise"), shown_seqs=beside)
        elif old is not None:
            if max(old.source_seqs) > max(note.sources):
                continue
            del left[decision.note or 0]
            work.drafts.append(Draft(deletion(old, work.seq), None))
            add_note(work, note, given[note.text], supersedes=(old.id,))
        else:
            add_note(work, note, given[note.text])


def _note(draft: SupplementDraft, shown: Sequence[Memory], version: str) -> Note:
    """The note with the episodes that the draft names; the oldest if it names none or an invalid number."""
    oldest = min(shown, key=lambda episode: max(episode.source_seqs))
    saying = named(draft.episodes, shown, otherwise=[oldest])
    sources = tuple(sorted({s for episode in saying for s in episode.source_seqs}))
    beside = only_shown((s for episode in shown for s in episode.reach), sources)
    return Note(draft.text, draft.kind, sources, version, beside)


def _prompt(question: str, episodes: Sequence[Memory]) -> Prompt:
    return supplement_prompt(question, listed(episodes))
