"""How messages become turns (spec, "Turns"): one exchange each."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import Message

INSTRUCTIONS = frozenset({"system", "developer"})
TOOL_RESULTS = frozenset({"tool", "function"})


def pair_chat(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The turns of one input line or one call, in order; every message is in exactly one.

    - With an assistant among them: a message and the assistant messages that answer it are one turn;
      a message without an answer, and each leading assistant message, is a turn alone.
    - Without an assistant (people talking to each other): a message and the next one by a different
      speaker (name, else role) are one turn; others stand alone.
    - System, developer, tool and function messages are no turns of their own but context of the turn
      they stand in. An instruction given after an answer belongs to the turn that follows it. Only a
      line that holds nothing else makes one turn of them.
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


def pair_dialogue(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Consecutive messages two by two, in order, an odd last one alone: the rule for LoCoMo."""
    return [tuple(messages[i : i + 2]) for i in range(0, len(messages), 2)]
