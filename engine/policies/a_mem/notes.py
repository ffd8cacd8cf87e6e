"""A-Mem's notes: construction, link generation and evolution (sections 3.1 to 3.3).

A note is stored as a fact. Its text is its content word for word, its keywords, its tags and its context; the
whole text is embedded. The content is a message, or a fact that NEMORI has distilled.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Effect, Embed, Vector
from undertow.engine.policies.work import Steps, Work, named, only_shown
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    annotate_prompt,
    connect_prompt,
    prompt_version,
)
from undertow.prompts.reply_schemas import AnnotateReply, ConnectReply

# k of equation 5: the authors' code shows five neighbours. The answer's ten are in the policy's tiers.
NEIGHBOURS = 5

_LABELS = ("Keywords: ", "Tags: ", "Context: ")


@dataclass(frozen=True, slots=True)
class Content:
    """c and t of equation 1, and the turns that it is of.

    `shown`: other turns whose words it may contain. `more`: what else its note is stored with.
    """

    text: str
    timestamp: str | None
    sources: tuple[int, ...]
    shown: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A stored note beside a new one. `reach`: the turns whose words `shown` may contain.

    `content`: see `content_of`.
    """

    note: Memory
    content: str | None
    shown: str
    reach: frozenset[int]


def write(work: Work, content: Content) -> Steps:
    """The note of a content, its links, and what its neighbours become. PromptTooLong."""
    text, version = yield from _annotated(work, content.text, content.timestamp)
    (vector,) = yield Embed((text,))
    near = yield from _neighbours(work, text, content, vector)
    reply = ConnectReply(links=[], evolved=[])
    if near:
        reply = yield from work.ask(_connecting(text, content, near))
    links = tuple(n.note.id for n in named(reply.links, near, otherwise=()))
    more = {**content.more, "links": links, "shown_seqs": content.shown}
    work.new("fact", text, vector, content.sources, version, **more)
    yield from _evolve(work, text, content, near, reply)


def rewrite(work: Work, note: Memory, gone: frozenset[str]) -> Steps:
    """Construct a note again from its content alone, without links to the notes that are `gone`."""
    content = content_of(note)
    assert content is not None, "only notes are constructed again"
    text, version = yield from _annotated(work, content, note.timestamp)
    (vector,) = yield Embed((text,))
    links = tuple(i for i in note.links if i not in gone)
    beside = only_shown(own_turns(work, note), note.source_seqs)
    work.revise(note, text, vector, note.source_seqs, version, links=links, shown_seqs=beside)


def content_of(note: Memory) -> str | None:
    """A note's content word for word; None: a user's words, or a fact that is no note, left as they are."""
    content, *about = note.text.rsplit("\n", len(_LABELS))
    labelled = [line.startswith(label) for label, line in zip(_LABELS, about, strict=False)]
    return content if note.prompt_version is not None and sum(labelled) == len(_LABELS) else None


def own_turns(work: Work, note: Memory) -> frozenset[int]:
    """The turns whose words a note's content may contain.

    Of a message that is its turn; of a distilled fact those in its reach that its episode holds. All in its
    reach where that cannot be told.
    """
    if content_of(note) is None:
        return note.reach
    if note.source_messages:
        return frozenset(note.source_seqs)
    held = [e.source_seqs for e in work.every("episode") if e.id == note.episode_id and e.source_seqs]
    return note.reach.intersection({*note.source_seqs, *held[-1]}) if held else note.reach


def _annotated(work: Work, content: str, timestamp: str | None) -> Generator[Effect, Any, tuple[str, str]]:
    """The text of a note with K, G and X of equation 2, and the prompt's version."""
    prompt = annotate_prompt(ShownTurn(1, timestamp, content))
    reply: AnnotateReply = yield from work.ask(prompt)
    return note_text(content, reply), prompt.version


def _neighbours(
    work: Work, text: str, content: Content, vector: Vector
) -> Generator[Effect, Any, list[Neighbour]]:
    """The nearest notes (equations 4 and 5), without those whose turns were deleted since.

    Notes that do not fit into the prompt beside the new one are left out.
    """
    found = yield from work.known("fact", vector, NEIGHBOURS)
    near = [_neighbour(work, s.memory) for s in found if all(map(work.view.exists, s.memory.reach))]
    return work.fitting(near, lambda some: _connecting(text, content, some))


def _neighbour(work: Work, note: Memory) -> Neighbour:
    """A note that evolved is shown as its content alone: its context may hold words of other turns.

    Shown whole, each note would in time rest on the whole log, and a deletion would reach all notes.
    """
    content, own = content_of(note), own_turns(work, note)
    if content is not None and own != note.reach:
        return Neighbour(note, content, content, own)
    return Neighbour(note, content, note.text, note.reach)


def _connecting(text: str, content: Content, near: Sequence[Neighbour]) -> Prompt:
    shown = [ShownMemory(n, one.note.timestamp, one.shown) for n, one in enumerate(near, 1)]
    return connect_prompt(ShownMemory(1, content.timestamp, text), shown)


def _evolve(work: Work, text: str, content: Content, near: Sequence[Neighbour], reply: ConnectReply) -> Steps:
    """New keywords, tags and contexts of neighbours (equation 7); of two for a note the first counts.

    A small model gives a note the context of one beside it, word for word: that is left out.
    """
    first = {change.note: change for change in reversed(reply.evolved)}
    texts = {
        one.note.id: newer
        for number, one in enumerate(near, 1)
        if number in first and one.content is not None
        for newer in [note_text(one.content, first[number])]
        if _context(newer) not in {_context(text), *(_context(n.note.text) for n in near if n is not one)}
    }
    seen = frozenset((*content.sources, *content.shown)).union(*(one.reach for one in near))
    changed = [one.note for one in near if texts.get(one.note.id, one.note.text) != one.note.text]
    if not changed:
        return
    vectors = yield Embed(tuple(texts[note.id] for note in changed))
    for note, vector in zip(changed, vectors, strict=True):
        # its history rests on what it evolved beside before
        beside = only_shown({*note.shown_seqs, *seen}, note.source_seqs)
        version = prompt_version("connect")
        work.revise(note, texts[note.id], vector, note.source_seqs, version, shown_seqs=beside)


def note_text(content: str, about: AnnotateReply) -> str:
    """A note as it is stored and embedded (equation 3): c, then K, G and X on a line each."""
    keywords, tags = (", ".join(map(_one_line, words)) for words in (about.keywords, about.tags))
    lines = zip(_LABELS, (keywords, tags, _one_line(about.context)), strict=True)
    return "\n".join([content, *(label + line for label, line in lines)])


def _context(text: str) -> str:
    return text.rpartition("\n")[2]


def _one_line(text: str) -> str:
    return " ".join(text.split())
