"""mem0ai in its own environment: the package's `Memory`, with Qdrant's local store in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

# read when mem0 is imported
os.environ["MEM0_TELEMETRY"] = "False"

from undertow.bench.peers.runner import (
    REPLY_TOKENS,
    Meter,
    OneAtATime,
    Options,
    dim_of,
    embeddings,
    said,
    serve,
)

# the package itself writes today's date into the prompt; a date of one's own is for its hosted platform alone
_OBSERVED = "These messages were said at {date}. That is their Observation Date, in place of the one above."


class Mem0:
    """One user a tenant, one `add` an exchange."""

    def __init__(self, options: Options, meter: Meter) -> None:
        self._meter = meter
        os.environ["MEM0_DIR"] = str(options.folder / "mem0")
        from mem0 import Memory

        self._memory = Memory.from_config(self._config(options))
        llm = self._memory.llm  # its settings have no place for it
        llm.client = llm.client.with_options(timeout=options.timeout_s)
        store = self._memory.vector_store  # that of entities shares its client
        store.client = OneAtATime(store.client)

    def _config(self, options: Options) -> dict[str, Any]:
        return {
            "llm": {
                "provider": "openai",
                "config": {
                    "model": options.model,
                    "openai_base_url": options.url,
                    "api_key": options.api_key,
                    "temperature": 0.0,
                    "max_tokens": REPLY_TOKENS,
                    "response_callback": self._count,
                },
            },
            "embedder": _embedder(options.encoder),
            "vector_store": {
                "provider": "qdrant",
                "config": {
                    "path": str(options.folder / "qdrant"),
                    "on_disk": True,
                    "collection_name": "memories",
                    "embedding_model_dims": dim_of(embeddings(options.encoder)),
                },
            },
            "history_db_path": str(options.folder / "history.db"),
        }

    def _count(self, llm: Any, response: Any, asked: Mapping[str, Any]) -> None:
        """On the thread that asked: mem0 calls the LLM where `add` was called."""
        if self._meter.spent is not None:
            self._meter.spent.count(response.usage.model_dump())

    def add(self, tenant: str, messages: Sequence[Mapping[str, str]], date: str | None) -> None:
        dated = {"metadata": {"date": date}, "prompt": _OBSERVED.format(date=date)} if date else {}
        self._memory.add(said(messages, date), user_id=tenant, **dated)

    def learned(self, tenant: str, messages: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        """Take in one exchange as it is, and return the memories made of it."""
        made: list[dict[str, Any]] = self._memory.add(list(messages), user_id=tenant)["results"]
        return made

    def search(self, tenant: str, query: str, count: int) -> list[dict[str, Any]]:
        found = self._memory.search(query, top_k=count, filters={"user_id": tenant})["results"]
        return [{"date": (hit.get("metadata") or {}).get("date"), "text": hit["memory"]} for hit in found]

    def close(self) -> None:
        self._memory.close()
        self._memory.vector_store.client.close()


def _embedder(encoder: str) -> dict[str, Any]:
    if encoder.startswith("hash:"):
        return {"provider": "langchain", "config": {"model": embeddings(encoder)}}
    return {"provider": "huggingface", "config": {"model": encoder, "model_kwargs": {"device": "cpu"}}}


if __name__ == "__main__":
    serve("mem0ai", Mem0)
