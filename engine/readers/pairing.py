"""Groups messages into turns of one exchange each (spec, "Turns")."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import INSTRUCTIONS, Message

TOOL_RESULTS = frozenset({"tool", "function"})


def pair_chat(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The turns of one input line or one call, in order. Every message is in exactly one turn.

    - With an assistant: a message and the assistant messages that answer it form a turn. A message without
      an answer, and each leading assistant message, is a turn by itself.
    - Without an assistant (people talking to each other): a message and the next one by another speaker
      (name, else role) form a turn. Others are turns by themselves.
    - System, developer, tool and function messages are context of the surrounding turn. An instruction after
      an answer belongs to the following turn. A line with nothing else becomes one turn.
    """
    if [m.role for m in messages] == ["user", "assistant"]:
        return [tuple(messages)]  # most lines of a chat log
    is_chat = any(m.role == "assistant" for m in messages)
    turns: list[list[Message]] = []
    waiting: list[Message] = []  # context that belongs to the next turn
    opener: Message | None = None
    answered = False
    for message in messages:
        if message.role in INSTRUCTIONS or message.role in TOOL_RESULTS:
            stays = turns and not waiting and (message.role in TOOL_RESULTS or not answered)
            (turns[-1] if stays else waiting).append(message)
            continue
        if opener is not None and _answers(message, opener, answered, is_chat):
            turns[-1] += [*waiting, message]
            answered = True
        else:
            turns.append([*waiting, message])
            opener = message
            answered = is_chat and message.role == "assistant"
        waiting = []
    if waiting and turns:
        turns[-1].extend(waiting)
    elif waiting:
        turns.append(waiting)
    return [tuple(turn) for turn in turns]


def _answers(message: Message, opener: Message, answered: bool, is_chat: bool) -> bool:
    if is_chat:
        return message.role == "assistant" and opener.role != "assistant"
    return not answered and message.speaker != opener.speaker


def own_time(messages: Sequence[Message]) -> str | None:
    """The first timestamp of a turn's messages."""
    for message in messages:
        if message.timestamp is not None:
            return message.timestamp
    return None


def pair_dialogue(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Pairs of consecutive messages, an odd last one alone: the rule for LoCoMo."""
    return [tuple(messages[i : i + 2]) for i in range(0, len(messages), 2)]
