"""MemoryOS's long-term personal memory: lines of a profile, user knowledge and agent traits (section 3.1).

A line is a fact whose `fact_kind` is profile, knowledge or agent. Each kind is a queue of fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Complete, Draft, Embed, Vector, deletion
from undertow.engine.policies.work import Steps, Work, listed, named, only_shown
from undertow.prompts.builders import Prompt, persona_prompt, prompt_version
from undertow.prompts.reply_schemas import PersonaLine, PersonaReply

# Section 4.1 has queues of 100. A profile is one text there; here it has lines, and all are shown.
QUEUES = {"profile": 20, "knowledge": 100, "agent": 100}


def learn(work: Work, pages: Sequence[int]) -> Steps:
    """Take what these pages tell about the persons into long-term memory. PromptTooLong."""
    longest = _profile(work)
    for part in work.parts(pages, lambda seqs: _prompt(work, seqs, longest)):
        profile = _profile(work)
        reply: PersonaReply = yield Complete(work.checked(_prompt(work, part, profile)))
        lines = {line.text: line for line in reversed(reply.lines)}
        told = [lines[text] for text in dict.fromkeys(line.text for line in reply.lines)]
        vectors = yield Embed(tuple(line.text for line in told))
        _store(work, part, profile, zip(told, vectors, strict=True))
    for kind, most in QUEUES.items():
        queue = [line for line in work.current("fact") if line.fact_kind == kind]
        work.drafts += [Draft(deletion(line, work.seq), None) for line in queue[: max(0, len(queue) - most)]]


def learned(work: Work) -> frozenset[int]:
    """The turns that were learned from: a reply has a line at least, and a line keeps all that it was shown.

    Lines that left a queue, or that a user deleted, count too.
    """
    lines = (*work.view.ended("fact"), *work.current("fact"))
    return frozenset(seq for line in lines for seq in line.reach)


def _profile(work: Work) -> list[Memory]:
    return [line for line in work.current("fact") if line.fact_kind == "profile"]


def _prompt(work: Work, pages: Sequence[int], profile: Sequence[Memory]) -> Prompt:
    return persona_prompt(work.turns(pages), listed(profile))


def _store(
    work: Work, part: Sequence[int], profile: Sequence[Memory], told: Iterable[tuple[PersonaLine, Vector]]
) -> None:
    """Store the lines: a repeat and a replaced line of the profile get a new version, others are new.

    A line of the profile that an earlier one has replaced, or a wrong number, replaces nothing.
    """
    left = dict(enumerate(profile, 1))
    version = prompt_version("persona")
    for line, vector in told:
        said = named(line.turns, part, otherwise=part)
        same = [fact for fact in work.current("fact") if fact.text == line.text]
        old = same[-1] if same else None
        if old is None and line.kind == "profile":
            old = left.pop(line.replaces or 0, None)
        sources = tuple(sorted({*said, *(() if old is None else old.source_seqs)}))
        beside = only_shown({*part, *(() if old is None else old.shown_seqs)}, sources)
        if old is None:
            work.new("fact", line.text, vector, sources, version, fact_kind=line.kind, shown_seqs=beside)
        else:
            work.revise(old, line.text, vector, sources, version, shown_seqs=beside)
            left = {n: other for n, other in left.items() if other.id != old.id}
