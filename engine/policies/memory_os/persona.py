"""MemoryOS's long-term personal memory: lines of a profile, user knowledge and agent traits (section 3.1).

A line is a fact whose `fact_kind` is profile, knowledge or agent. Each kind is a queue of fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Draft, Embed, Vector, deletion
from undertow.engine.policies.memory_os.pages import Key, Page, Pages, as_turns
from undertow.engine.policies.work import Steps, Work, listed, named
from undertow.prompts.builders import Prompt, persona_prompt, prompt_version
from undertow.prompts.reply_schemas import PersonaLine, PersonaReply

# Section 4.1 has queues of 100. A profile is one text there; here it has lines, and all are shown.
QUEUES = {"profile": 20, "knowledge": 100, "agent": 100}


def learn(pages: Pages[Key], some: Sequence[Page[Key]]) -> Steps:
    """Take what these pages tell about the persons into long-term memory. PromptTooLong."""
    work, longest = pages.work, _lines(pages.work, "profile")
    for part in work.parts(some, lambda few: _prompt(few, longest)):
        profile = _lines(work, "profile")
        reply: PersonaReply = yield from work.ask(_prompt(part, profile))
        lines = {line.text: line for line in reversed(reply.lines)}
        told = [lines[text] for text in dict.fromkeys(line.text for line in reply.lines)]
        vectors = yield Embed(tuple(line.text for line in told))
        _store(pages, part, profile, zip(told, vectors, strict=True))
    for kind, most in QUEUES.items():
        queue = _lines(work, kind)
        work.drafts += [Draft(deletion(line, work.seq), None) for line in queue[: max(0, len(queue) - most)]]


def learned(pages: Pages[Key]) -> frozenset[Key]:
    """The pages that were learned from: a reply has a line at least, and a line keeps all that it was shown.

    Lines that left a queue, or that a user deleted, count too.
    """
    lines = [line for line in pages.work.every("fact") if line.fact_kind in QUEUES]
    return frozenset(key for line in lines for key in pages.keys(line))


def _lines(work: Work, *kinds: str) -> list[Memory]:
    return [line for line in work.current("fact") if line.fact_kind in kinds]


def _prompt(pages: Sequence[Page[Key]], profile: Sequence[Memory]) -> Prompt:
    return persona_prompt(as_turns(pages), listed(profile))


def _store(
    pages: Pages[Key],
    part: Sequence[Page[Key]],
    profile: Sequence[Memory],
    told: Iterable[tuple[PersonaLine, Vector]],
) -> None:
    """Store the lines: a repeat and a replaced line of the profile get a new version, others are new.

    A line of the profile that an earlier one has replaced, or a wrong number, replaces nothing.
    """
    work, left = pages.work, dict(enumerate(profile, 1))
    version = prompt_version("persona")
    for line, vector in told:
        said = named(line.turns, part, otherwise=part)
        same = [one for one in _lines(work, *QUEUES) if one.text == line.text]
        old = same[-1] if same else None
        if old is None and line.kind == "profile":
            old = left.pop(line.replaces or 0, None)
        sources, more = pages.made_of(said, part, old)
        if old is None:
            work.new("fact", line.text, vector, sources, version, fact_kind=line.kind, **more)
        else:
            work.revise(old, line.text, vector, sources, version, **more)
            left = {n: other for n, other in left.items() if other.id != old.id}
