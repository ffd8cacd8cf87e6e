"""What the mock LLM replies to other memory systems: mem0ai's JSON and langmem's tool calls.

As in `mock.replies`: a pure function of seed and request that echoes words of what is new in it, and
understands nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from undertow.bench.mock.replies import FACT_WORDS, Messages, share

# what the two mark their new messages with
_NEW = re.compile(r"## New Messages\n(.*?)\n\n## |<session_[^>]*>\n(.*?)\n</session_", re.DOTALL)
# langmem offers these beside the tool that makes a memory
_CHANGING = ("PatchDoc", "RemoveDoc", "Done")


def json_reply(seed: int, messages: Messages) -> str:
    """One or two memories, as mem0ai 2 asks for with {"type": "json_object"}."""
    memories = [{"id": str(n), "text": text} for n, text in enumerate(_facts(seed, messages))]
    return json.dumps({"memory": memories}, ensure_ascii=False)


def tool_calls(seed: int, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One or two calls of the first tool that makes something, its texts filled in; ValueError: none does."""
    makers = [tool["function"] for tool in tools if tool["function"]["name"] not in _CHANGING]
    if not makers:
        raise ValueError("there is no tool that makes a memory")
    texts = makers[0].get("parameters", {}).get("required", [])
    return [
        {
            "id": f"call-{n}",
            "type": "function",
            "function": {"name": makers[0]["name"], "arguments": json.dumps(dict.fromkeys(texts, fact))},
        }
        for n, fact in enumerate(_facts(seed, messages))
    ]


def _facts(seed: int, messages: Messages) -> list[str]:
    """As many as our own prompts get facts: one or two, by hash."""
    user = messages[-1]["content"]
    found = _NEW.search(user)
    words = (user if found is None else found[1] or found[2]).split()
    count = 1 + int(2 * share(orjson.dumps([seed, user]), "facts"))
    pieces = [words[n * FACT_WORDS : (n + 1) * FACT_WORDS] for n in range(count)]
    return [" ".join(piece) for piece in pieces if piece]
