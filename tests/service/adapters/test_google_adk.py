"""Google's ADK with our memory: its own runner, sessions and tool."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.in_process import InProcess

from ...support.cluster.in_process import PARTS, settings
from ...support.service.packages import needed

needed("google.adk")

from google.adk.agents import LlmAgent
from google.adk.events.event import Event
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools.load_memory_tool import load_memory_tool
from google.genai import types

from undertow.serving.adapters.google_adk import UndertowMemoryService

pytestmark = pytest.mark.anyio

BOAT = "My boat Petrel lies in the harbour of Wick."


class Scripted(BaseLlm):
    """A model that says its lines; a line that begins with ? is looked up in memory first."""

    lines: list[str]
    seen: list[str] = []  # noqa: RUF012 - pydantic copies it

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        line = self.lines.pop(0)
        for content in llm_request.contents[-1:]:
            for part in content.parts or []:
                self.seen.append(
                    str(part.function_response.response if part.function_response else part.text)
                )
        part = types.Part(text=line)
        if line.startswith("?"):
            part = types.Part.from_function_call(name="load_memory", args={"query": line[1:]})
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def event(text: str, author: str = "user", **more: Any) -> Event:
    return Event(author=author, content=types.Content(parts=[types.Part(text=text)]), **more)


async def texts(service: UndertowMemoryService, app: str, user: str, query: str = "boat") -> list[str]:
    found = await service.search_memory(app_name=app, user_id=user, query=query)
    return [part.text or "" for entry in found.memories for part in entry.content.parts or []]


async def test_an_agent_remembers_from_one_session_to_the_next(served: Any) -> None:
    memory, sessions = UndertowMemoryService(served), InMemorySessionService()
    model = Scripted(model="scripted", lines=["Noted.", "?boat harbour", "In Wick."])
    agent = LlmAgent(name="helper", model=model, tools=[load_memory_tool])
    runner = Runner(app_name="app", agent=agent, session_service=sessions, memory_service=memory)

    async def say(session_id: str, text: str) -> str:
        said = types.Content(role="user", parts=[types.Part(text=text)])
        replies = [
            "".join(part.text or "" for part in event.content.parts or [])
            async for event in runner.run_async(user_id="ann", session_id=session_id, new_message=said)
            if event.content
        ]
        return replies[-1]

    first = await sessions.create_session(app_name="app", user_id="ann")
    assert await say(first.id, BOAT) == "Noted."
    whole = await sessions.get_session(app_name="app", user_id="ann", session_id=first.id)
    assert whole is not None
    for _ in range(2):  # the second time adds nothing
        await memory.add_session_to_memory(whole)
    assert sorted(await texts(memory, "app", "ann")) == ["helper: Noted.", f"user: {BOAT}"]

    second = await sessions.create_session(app_name="app", user_id="ann")
    assert await say(second.id, "Where is it?") == "In Wick."
    assert BOAT in model.seen[-1]


async def test_events_are_added_once_with_their_times_and_metadata(served: Any) -> None:
    memory = UndertowMemoryService(served)
    ann: dict[str, Any] = {"app_name": "events", "user_id": "ann"}
    events = [
        event(BOAT, id="e1", timestamp=1_770_000_000.5),
        event("thinking of boats", "helper", id="e2", partial=True),
        Event(author="helper", id="e3"),
        event("A fine boat.", "helper", id="e4"),
    ]
    for given in (events[:2], events):
        await memory.add_events_to_memory(**ann, events=given, session_id="s", custom_metadata={"n": 1})
    found = await memory.search_memory(**ann, query=BOAT)
    assert len(found.memories) == 2
    best = found.memories[0]
    assert best.timestamp is not None and best.timestamp.startswith("2026-02-02T02:40:00.5")
    assert best.id is not None and best.custom_metadata["kind"] == "turn"
    await memory.delete_memory(**ann, memory_id=best.id)
    await memory.add_events_to_memory(**ann, events=events, session_id="s")
    assert await texts(memory, "events", "ann") == ["helper: A fine boat."], "what is deleted stays so"
    with pytest.raises(UndertowError):
        await memory.delete_memory(**ann, memory_id=best.id)
    with pytest.raises(ValueError, match="memory_id is missing"):
        await memory.delete_memory(**ann)


async def test_users_and_apps_do_not_see_each_other(served: Any) -> None:
    memory = UndertowMemoryService(served)
    owners = [("a", "b/c"), ("a/b", "c"), ("a", "b"), ("a", ""), ("", "a"), ("a%2Fb", "c"), ("ä", "ß.")]
    for n, (app, user) in enumerate(owners):
        assert await texts(memory, app, user) == []
        await memory.add_events_to_memory(app_name=app, user_id=user, events=[event(f"boat {n}", id="e")])
    for n, (app, user) in enumerate(owners):
        assert await texts(memory, app, user) == [f"user: boat {n}"]


async def test_a_failure_is_no_empty_answer(tmp_path: Path) -> None:
    with InProcess(tmp_path, settings(), PARTS) as api:
        memory = UndertowMemoryService(api)
        await memory.add_events_to_memory(app_name="a", user_id="b", events=[event("boat", id="e")])
        with pytest.raises(ValueError, match="query is empty"):
            await memory.search_memory(app_name="a", user_id="b", query=" ")
    with pytest.raises(UndertowError):
        await memory.search_memory(app_name="a", user_id="b", query="boat")
