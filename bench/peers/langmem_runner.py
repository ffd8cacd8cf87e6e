"""langmem in its own environment: its store manager, which LangMem runs in the background, over LangGraph's
in-memory store; what the store holds is written to the run's folder after each exchange.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_openai import ChatOpenAI
from langgraph.store.memory import InMemoryStore
from langmem import create_memory_store_manager

from undertow.bench.peers.runner import REPLY_TOKENS, Meter, Options, Spent, dim_of, embeddings, said, serve


class Counted(BaseCallbackHandler):  # type: ignore[misc]  # not installed where mypy runs
    """The cost of each call, and the replies without a call that can be read, which langmem passes over."""

    def __init__(self, spent: Spent) -> None:
        self._spent = spent

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self._spent.count((response.llm_output or {}).get("token_usage") or {})
        message = response.generations[0][0].message
        if message.invalid_tool_calls or not message.tool_calls:
            ended = message.response_metadata.get("finish_reason")
            self._spent.complain(f"a reply without a tool call that can be read; it ended by {ended!r}")


class Calling(ChatOpenAI):  # type: ignore[misc]
    """Asked for a tool call wherever it may make one: a small model that is free to writes it as prose, which
    no server reads as a call, and nothing is remembered.
    """

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **options: Any) -> Any:
        return super().bind_tools(tools, tool_choice=tool_choice or "required", **options)


class Store(InMemoryStore):
    """It looks through a dictionary that other threads would change meanwhile: batches take turns."""

    def __init__(self, *, index: Any) -> None:
        super().__init__(index=index)
        self._turn = threading.Lock()

    def batch(self, ops: Any) -> list[Any]:
        with self._turn:
            done: list[Any] = super().batch(ops)
            return done


class LangMem:
    """One namespace a tenant, one run of the manager an exchange."""

    def __init__(self, options: Options, meter: Meter) -> None:
        self._meter = meter
        self._folder = options.folder / "memories"
        self._folder.mkdir(exist_ok=True)
        encoder = embeddings(options.encoder)
        self._store = Store(index={"dims": dim_of(encoder), "embed": encoder})
        llm = Calling(
            model=options.model,
            base_url=options.url,
            api_key=options.api_key,
            timeout=options.timeout_s,
            temperature=0,
            max_tokens=REPLY_TOKENS,
        )
        self._manager = create_memory_store_manager(
            llm, store=self._store, namespace=("memories", "{langgraph_user_id}")
        )
        # by tenant and key: the memory as the store has it, and the date of the exchange that changed it last
        self._kept: dict[str, dict[str, dict[str, Any]]] = {}
        for file in sorted(self._folder.glob("*.json")):
            self._restore(file)

    def _restore(self, file: Path) -> None:
        user = file.stem
        self._kept[user] = json.loads(file.read_text(encoding="utf-8"))
        for key, memory in self._kept[user].items():
            self._store.put(("memories", user), key, memory["value"])

    def add(self, tenant: str, messages: Sequence[Mapping[str, str]], date: str | None) -> None:
        user, spent = _label(tenant), self._meter.spent
        assert spent is not None, "called by `serve`"
        speaking = {"user": HumanMessage, "assistant": AIMessage}
        chat = [speaking.get(m["role"], HumanMessage)(m["content"]) for m in said(messages, date)]
        config: Any = {"configurable": {"langgraph_user_id": user}, "callbacks": [Counted(spent)]}
        kept = self._kept.setdefault(user, {})
        for put in self._manager.invoke({"messages": chat}, config=config):
            # the manager does not look at what became of its writes
            stored = self._store.get(put["namespace"], put["key"])
            if stored is None or stored.value != put["value"]:
                raise RuntimeError(f"langmem made a memory and did not store it: {put['value']}")
            kept[put["key"]] = {"value": put["value"], "date": date}
        draft = self._folder / f"{user}.draft"
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(self._folder / f"{user}.json")

    def search(self, tenant: str, query: str, count: int) -> list[dict[str, Any]]:
        user = _label(tenant)
        found = self._store.search(("memories", user), query=query, limit=count)
        kept = self._kept.get(user, {})
        return [{"date": kept[hit.key]["date"], "text": _words(hit.value)} for hit in found]

    def close(self) -> None:
        pass


def _label(tenant: str) -> str:
    """A namespace's part: LangGraph allows no dots in it."""
    return hashlib.blake2b(tenant.encode(), digest_size=12).hexdigest()


def _words(value: Mapping[str, Any]) -> str:
    content = value["content"]
    return str(content["content"] if isinstance(content, dict) and "content" in content else content)


if __name__ == "__main__":
    serve("langmem", LangMem)
