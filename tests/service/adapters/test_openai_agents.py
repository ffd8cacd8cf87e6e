"""The OpenAI Agents SDK with our session: its own runner and SQLite session, and a scripted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.in_process import InProcess

from ...support.cluster.in_process import PARTS, settings
from ...support.service.packages import needed

needed("agents")

from agents import Agent, RunConfig, Runner, function_tool
from agents.memory import Session, SessionSettings, SQLiteSession
from agents.testing import ScriptedModel, assistant_message, function_call

from undertow.serving.adapters.openai_agents import UndertowSession

pytestmark = pytest.mark.anyio

UNTRACED = RunConfig(tracing_disabled=True)


async def remembered(session: UndertowSession, query: str = "boat") -> list[str]:
    return sorted(hit.memory for hit in await session.search(query) if hit.kind == "turn")


async def test_a_run_keeps_exact_items_and_remembers_what_was_said(served: Any) -> None:
    @function_tool
    def tide(port: str) -> str:
        """The tide at a port."""
        return f"high tide at {port}"

    model = ScriptedModel(
        [
            [function_call("tide", {"port": "Wick"}, call_id="c1")],
            [assistant_message("Sail your boat at noon.")],
            [assistant_message("Noon, I said.")],
        ]
    )
    agent = Agent(name="pilot", model=model, tools=[tide])
    plain = SQLiteSession("one")
    session = UndertowSession(plain, served, "agents/ann")
    assert isinstance(session, Session)
    done = await Runner.run(agent, "When can my boat leave Wick?", session=session, run_config=UNTRACED)
    assert done.final_output == "Sail your boat at noon."
    items = await session.get_items()
    assert items == await plain.get_items()
    kinds = [item.get("type") or item.get("role") for item in items]
    assert kinds == ["user", "function_call", "function_call_output", "message"]
    assert await remembered(session) == [
        "assistant: Sail your boat at noon.",
        "user: When can my boat leave Wick?",
    ]
    await Runner.run(agent, "When?", session=session, run_config=UNTRACED)
    assert (await session.get_items(limit=2))[0].get("content") == "When?"
    model.assert_complete()

    last = await session.pop_item()
    assert last is not None and last not in await session.get_items()
    await session.clear_session()
    assert await session.get_items() == [] and await session.pop_item() is None
    kept = UndertowSession(SQLiteSession("two"), served, "agents/ann")
    assert any("Noon, I said." in text for text in await remembered(kept, "noon")), "nothing is forgotten"
    assert await remembered(UndertowSession(SQLiteSession("one"), served, "agents/bob")) == []


async def test_only_the_words_of_user_and_assistant_are_remembered(served: Any) -> None:
    session = UndertowSession(SQLiteSession("parts"), served, "agents/parts")
    items: list[Any] = [
        {"role": "system", "content": "Speak of boats."},
        {"role": "user", "content": [{"type": "input_text", "text": "two boats"}, {"type": "input_image"}]},
        {"type": "function_call", "name": "boat", "arguments": "{}", "call_id": "c"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "boat ahoy"}]},
        {"role": "user", "content": " "},
    ]
    await session.add_items(items)
    assert await session.get_items() == items
    assert await remembered(session) == ["user: two boats\nassistant: boat ahoy"]
    session.close()  # the other session's own


async def test_what_is_not_remembered_is_an_error_and_the_session_has_it(tmp_path: Path) -> None:
    plain = SQLiteSession("lost")
    with InProcess(tmp_path, settings(), PARTS) as api:
        session = UndertowSession(plain, api, "agents/lost")
    with pytest.raises(UndertowError):
        await session.add_items([{"role": "user", "content": "boat"}])
    with pytest.raises(UndertowError):
        await session.search("boat")
    assert await plain.get_items() == [{"role": "user", "content": "boat"}]


async def test_the_settings_are_those_of_the_session_inside(served: Any) -> None:
    plain = SQLiteSession("settings")
    session = UndertowSession(plain, served, "agents/settings")
    session.session_settings = SessionSettings(limit=1)
    assert plain.session_settings == session.session_settings == SessionSettings(limit=1)
    await session.add_items([{"role": "user", "content": text} for text in ("one", "two")])
    assert await session.get_items() == [{"role": "user", "content": "two"}]
