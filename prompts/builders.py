"""The prompts: fills the Jinja2 templates of `templates/`, whose replies `reply_schemas` describes.

Roles and rules follow RecMem (appendix F), Mem0 for the eager policy, NEMORI (appendix D), HiMem, A-Mem and
MemoryOS; the wording is our own. Each system message is fixed text; all but those of answers have the same
opening. Everything variable goes into the user message, so that the server's prefix cache covers the fixed
part.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined, meta

from undertow.prompts.operations import FUSED, REPLIES, Operation, PromptName
from undertow.prompts.relative_times import relative_times
from undertow.prompts.reply_schemas import Reply

UNDATED = "undated"
"""Replaces an unknown date in a prompt."""
# each policy's templates in a folder of its own; names are unique over all of them
_LOADER = FileSystemLoader(sorted((Path(__file__).parent / "templates").iterdir()))
# how an answering prompt sorts its memories
Order = Literal["relevance", "time"]
# see AnswerStyle of the engine; each has its template
Style = Literal["notes", "short", "paper"]

# Chat templates wrap messages in control tokens such as <|im_end|>, </s>, <start_of_turn> and [INST];
# servers recognise them inside content too. Also escaped: characters that some parsers treat as a line
# end, and lone surrogates, which UTF-8 cannot encode.
_RISKY = re.compile(r"<(?![\s\d=-])|\[(?=/?[A-Za-z_]+\])|[\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_BYTES_PER_TOKEN = 3  # below the 3.5 to 4.5 of common tokenizers on prose
_OVERHEAD_TOKENS = 32  # the chat template around two messages


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn as a prompt shows it. `number` is how replies refer to it; `timestamp` ISO 8601."""

    number: int
    timestamp: str | None
    text: str


@dataclass(frozen=True, slots=True)
class ShownMemory:
    """An episode, fact or retrieved turn as a prompt shows it. `date` is shown verbatim; None if unknown."""

    number: int
    date: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to the LLM. `reply` is the schema of its reply; None for plain text.

    `after_notes`: the text begins with notes, and what is wanted stands behind "Answer:".
    """

    operation: Operation
    system: str
    user: str
    reply: type[Reply] | None
    version: str
    after_notes: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt in the form of OpenAI's chat completions."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.user}]

    @property
    def size_tokens(self) -> int:
        """An upper estimate of the prompt's tokens: bytes / 3, plus the chat template."""
        return size_tokens(self.messages)


def size_tokens(messages: Sequence[Mapping[str, str]]) -> int:
    """An upper estimate, see `Prompt.size_tokens`."""
    size_bytes = sum(len(message["content"].encode()) for message in messages)
    return math.ceil(size_bytes / _BYTES_PER_TOKEN) + _OVERHEAD_TOKENS


def episode_prompt(turns: Sequence[ShownTurn]) -> Prompt:
    """Ask for the episodes of a cluster (equation 7)."""
    return _prompt("episode", turns=turns)


def episode_facts_prompt(turns: Sequence[ShownTurn], facts: Sequence[ShownMemory]) -> Prompt:
    """`episode_prompt` and `refine_prompt` in one: each episode has its facts, new against `facts`."""
    return _prompt("episode_facts", turns=turns, facts=facts)


def merge_prompt(episode: ShownMemory, turn: ShownTurn) -> Prompt:
    """Ask whether `turn` continues `episode`, and for the merged narrative (equation 6)."""
    return _prompt("merge", episode=episode, turn=turn)


def merge_facts_prompt(episode: ShownMemory, facts: Sequence[ShownMemory], turn: ShownTurn) -> Prompt:
    """`merge_prompt` and `refine_prompt` in one: the facts of `turn`, new against `facts`.

    The turn comes last: what is shown before it is often the same for the next turn.
    """
    return _prompt("merge_facts", episode=episode, facts=facts, turn=turn)


def refine_prompt(episode: ShownMemory, turns: Sequence[ShownTurn], facts: Sequence[ShownMemory]) -> Prompt:
    """Ask for facts of `turns` that `episode` misses, new against the stored `facts` (equation 9)."""
    return _prompt("refine", episode=episode, turns=turns, facts=facts)


def direct_prompt(turns: Sequence[ShownTurn], facts: Sequence[ShownMemory]) -> Prompt:
    """Ask for facts of `turns` without an episode as reference (RecMem, section 4.3: an ablation)."""
    return _prompt("direct", turns=turns, facts=facts)


def salient_prompt(turns: Sequence[ShownTurn], facts: Sequence[ShownMemory]) -> Prompt:
    """Ask for facts of `turns` that each say much, though their topics may never come back."""
    return _prompt("salient", turns=turns, facts=facts)


def extract_prompt(recent: Sequence[ShownTurn], turn: ShownTurn) -> Prompt:
    """Ask for the facts of the newest `turn`; the `recent` turns are its context (eager policy)."""
    return _prompt("extract", recent=recent, turn=turn)


def reconcile_prompt(candidates: Sequence[ShownMemory], facts: Sequence[ShownMemory]) -> Prompt:
    """Ask how each candidate changes the stored `facts` (eager policy)."""
    return _prompt("reconcile", candidates=candidates, facts=facts)


def partition_prompt(messages: Sequence[ShownTurn]) -> Prompt:
    """Ask which of a window's `messages` belong together (NEMORI, section 3.2.1)."""
    return _prompt("partition", messages=messages)


def narrate_prompt(messages: Sequence[ShownTurn]) -> Prompt:
    """Ask for cue and narrative of one raw episode (NEMORI, section 3.2.2)."""
    return _prompt("narrate", messages=messages)


def select_prompt(episode: ShownMemory, candidates: Sequence[ShownMemory]) -> Prompt:
    """Ask which of the stored `candidates` the new `episode` continues (NEMORI, section 3.2.3)."""
    return _prompt("select", episode=episode, candidates=candidates)


def integrate_prompt(episodes: Sequence[ShownMemory]) -> Prompt:
    """Ask for the cue and narrative of two `episodes` merged into one (NEMORI, section 3.2.3)."""
    return _prompt("integrate", episodes=episodes)


def predict_prompt(cue: ShownMemory, facts: Sequence[ShownMemory]) -> Prompt:
    """Ask for a prediction of the episode from its `cue` and known `facts` (NEMORI, section 3.3.1)."""
    return _prompt("predict", cue=cue, facts=facts)


def distil_prompt(messages: Sequence[ShownTurn], prediction: ShownMemory) -> Prompt:
    """Ask for facts of `messages` that the `prediction` misses (NEMORI, section 3.3.2)."""
    return _prompt("distil", messages=messages, prediction=prediction)


def distil_direct_prompt(messages: Sequence[ShownTurn]) -> Prompt:
    """Ask for the facts of `messages` without a prediction (NEMORI-s, section 4.4)."""
    return _prompt("distil_direct", messages=messages)


def consolidate_prompt(fact: ShownMemory, facts: Sequence[ShownMemory]) -> Prompt:
    """Ask whether `fact` is new beside the stored `facts` (NEMORI, section 3.3.3)."""
    return _prompt("consolidate", fact=fact, facts=facts)


def consolidate_all_prompt(candidates: Sequence[ShownMemory], facts: Sequence[ShownMemory]) -> Prompt:
    """`consolidate_prompt` for several new facts at once: `candidates`, beside the stored `facts`."""
    return _prompt("consolidate_all", candidates=candidates, facts=facts)


def summarise_prompt(facts: Sequence[ShownMemory], summary: Sequence[ShownMemory]) -> Prompt:
    """Ask for the running `summary` (at most one memory) extended by `facts` (NEMORI, appendix A.1)."""
    return _prompt("summarise", facts=facts, summary=summary)


def segment_prompt(turns: Sequence[ShownTurn]) -> Prompt:
    """Ask for the topic shifts and surprises in a dialogue window (HiMem, section 2.2.1)."""
    return _prompt("segment", turns=turns)


def notes_prompt(turns: Sequence[ShownTurn]) -> Prompt:
    """Ask for what the turns state explicitly (HiMem, section 2.2.2, stage 1)."""
    return _prompt("notes", turns=turns)


def notes_all_prompt(turns: Sequence[ShownTurn]) -> Prompt:
    """Ask for what the turns state and imply, in lasting form (section 2.2.2, all stages at once)."""
    return _prompt("notes_all", turns=turns)


def traits_prompt(turns: Sequence[ShownTurn], notes: Sequence[ShownMemory]) -> Prompt:
    """Ask for implied preferences and traits, given the `notes` of stage 1 (section 2.2.2, stage 2)."""
    return _prompt("traits", turns=turns, notes=notes)


def align_prompt(turns: Sequence[ShownTurn], notes: Sequence[ShownMemory]) -> Prompt:
    """Ask to resolve duplicates, names and dates in `notes`, using the turns (section 2.2.2, stage 3)."""
    return _prompt("align", turns=turns, notes=notes)


def supplement_prompt(question: str, episodes: Sequence[ShownMemory]) -> Prompt:
    """Ask for notes that answer the `question` but are not stored yet (HiMem, section 2.4)."""
    return _prompt("supplement", question=question, episodes=episodes)


def revise_prompt(candidates: Sequence[ShownMemory], notes: Sequence[ShownMemory]) -> Prompt:
    """Ask how each candidate relates to the stored `notes` (HiMem, section 2.4)."""
    return _prompt("revise", candidates=candidates, notes=notes)


def sufficiency_prompt(
    question: str, heading: str, memories: Sequence[ShownMemory], as_of: str | None
) -> Prompt:
    """Ask whether `memories` suffice to answer (HiMem, section 2.4)."""
    return _prompt("sufficiency", heading=heading, memories=memories, as_of=as_of, question=question)


def annotate_prompt(message: ShownTurn) -> Prompt:
    """Ask for keywords, tags and context of a `message` (A-Mem, equation 2)."""
    return _prompt("annotate", message=message)


def connect_prompt(note: ShownMemory, notes: Sequence[ShownMemory]) -> Prompt:
    """Ask for the links of a new `note`, and how it changes the stored `notes` (A-Mem, equations 6 and 7)."""
    return _prompt("connect", note=note, notes=notes)


def topic_prompt(summary: Sequence[ShownMemory], turns: Sequence[ShownTurn]) -> Prompt:
    """Ask for summary and keywords of `turns` and a stored `summary` (MemoryOS, section 3.1; one or none)."""
    return _prompt("topic", summary=summary, turns=turns)


def persona_prompt(turns: Sequence[ShownTurn], facts: Sequence[ShownMemory]) -> Prompt:
    """Ask for long-term memory of both sides; `facts`: the stored profile (MemoryOS, section 3.1)."""
    return _prompt("persona", turns=turns, facts=facts)


def answer_prompt(
    question: str,
    episodes: Sequence[ShownMemory],
    facts: Sequence[ShownMemory],
    turns: Sequence[ShownMemory],
    as_of: str | None,
    *,
    order: Order = "relevance",
    style: Style = "notes",
) -> Prompt:
    """Ask the question with memories of the three tiers (RecMem, section 3.5), sorted by `order`.

    Turns come first, but for the style `paper`: a small model answers with the first date that it sees,
    and an episode's is seldom that (docs/decisions/0008).
    """
    tiers = (("Turns", turns), ("Facts", facts), ("Episodes", episodes))
    sections = tiers[::-1] if style == "paper" else tiers
    told = {"sections": sections, "as_of": as_of, "question": question}
    asked = _block("question", "user", order=order, has_times=style != "paper", **told)
    system, version = _block(f"answer_{style}", "system"), answer_version(style)
    return Prompt("answer", system, asked, None, version, after_notes=style != "paper")


def repair_messages(prompt: Prompt, bad_reply: str, problem: str) -> list[dict[str, str]]:
    """The messages of `prompt`, followed by the unusable reply and the problem with it."""
    request = _block(
        "repair",
        "user",
        problem=_defused(problem),
        schema=prompt.reply is not None,
        after_notes=prompt.after_notes,
    )
    return [
        *prompt.messages,
        {"role": "assistant", "content": _defused(bad_reply) or "(empty)"},
        {"role": "user", "content": request},
    ]


def fenced(shown: ShownTurn | ShownMemory) -> str:
    """One line of material, `[number, date, text]`, as JSON: no text can break out of its line or string."""
    date = shown.timestamp if isinstance(shown, ShownTurn) else shown.date
    return quoted([shown.number, date or UNDATED, shown.text])


def anchored(shown: ShownTurn | ShownMemory) -> str:
    """As `fenced`; the dates of any relative times are a fourth item, {"yesterday":"7 May 2023"}."""
    date = shown.timestamp if isinstance(shown, ShownTurn) else shown.date
    times = relative_times(shown.text, date)
    line = [shown.number, date or UNDATED, shown.text]
    return quoted([*line, times] if times else line)


def quoted(value: Any) -> str:
    """`value` as one line of JSON without control tokens of any chat template."""
    return _defused(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _defused(text: str) -> str:
    return _RISKY.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def prompt_version(name: PromptName) -> str:
    """12 hex digits: a digest of the fixed texts and the reply schema of a prompt, not "answer"."""
    return _digest((f"{name}.j2",), REPLIES[name])


@cache
def answer_version(style: Style) -> str:
    """As `prompt_version`, of the answering prompt in a style."""
    return _digest((f"answer_{style}.j2", "question.j2"), None)


def prompt_versions(style: Style) -> dict[PromptName, str]:
    """The version of each prompt."""
    return {op: answer_version(style) if op == "answer" else prompt_version(op) for op in sorted(REPLIES)}


def _digest(templates: Sequence[str], reply: type[Reply] | None) -> str:
    digest = hashlib.blake2b(digest_size=6)
    included = [meta.find_referenced_templates(_templates().parse(_source(name))) for name in templates]
    for name in (*filter(None, chain(*included)), *templates, "repair.j2"):
        digest.update(_source(name).encode() + b"\x1f")
    if reply is not None:
        digest.update(json.dumps(reply.wire_schema(), sort_keys=True).encode())
    return digest.hexdigest()


def _source(template: str) -> str:
    return _LOADER.get_source(_templates(), template)[0]


@cache
def _templates() -> Environment:
    env = Environment(  # plain text for a model, no HTML: nothing to autoescape
        loader=_LOADER, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    env.filters["fenced"] = fenced
    env.filters["anchored"] = anchored
    env.filters["quoted"] = quoted
    return env


def _block(template_name: str, block: str, **variables: Any) -> str:
    template = _templates().get_template(f"{template_name}.j2")
    return "".join(template.blocks[block](template.new_context(variables))).strip()


@cache
def system_message(name: PromptName) -> str:
    """The fixed text of a prompt, not "answer"; unique to it."""
    return _block(name, "system")


def operation_of(name: PromptName) -> Operation:
    """The operation that a prompt is metered as."""
    return FUSED.get(name) or cast(Operation, name)


def _prompt(name: PromptName, **variables: Any) -> Prompt:
    return Prompt(
        operation_of(name),
        system_message(name),
        _block(name, "user", **variables),
        REPLIES[name],
        prompt_version(name),
    )
