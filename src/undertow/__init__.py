"""Undertow: long-term memory for LLM agents, with an LLM call when a topic recurs.

The public names below are loaded on first use, so that `import undertow.kernels` needs no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.engine.api.engine import Engine as Engine
    from undertow.engine.api.engine import make_llm as make_llm
    from undertow.engine.api.transfer.arrow import export_parquet as export_parquet
    from undertow.engine.api.transfer.arrow import export_tables as export_tables
    from undertow.engine.base.config import Settings as Settings
    from undertow.engine.base.model import Memory as Memory
    from undertow.engine.base.model import Message as Message
    from undertow.engine.base.model import Turn as Turn
    from undertow.engine.base.model import UndertowError as UndertowError
    from undertow.engine.cluster.ray.actors import connect as connect
    from undertow.engine.cluster.ray.cluster import Cluster as Cluster
    from undertow.engine.cluster.ray.datasink import write_turns as write_turns
    from undertow.engine.cluster.settings import ClusterSettings as ClusterSettings
    from undertow.engine.encoders.factory import make_encoder as make_encoder
    from undertow.serving.client import AsyncClient as AsyncClient
    from undertow.serving.client import Client as Client

__version__ = "1.0.1"

_HOMES = {
    "AsyncClient": "serving.client",
    "Client": "serving.client",
    "Cluster": "engine.cluster.ray.cluster",
    "ClusterSettings": "engine.cluster.settings",
    "Engine": "engine.api.engine",
    "Memory": "engine.base.model",
    "Message": "engine.base.model",
    "Settings": "engine.base.config",
    "Turn": "engine.base.model",
    "UndertowError": "engine.base.model",
    "connect": "engine.cluster.ray.actors",
    "export_parquet": "engine.api.transfer.arrow",
    "export_tables": "engine.api.transfer.arrow",
    "make_encoder": "engine.encoders.factory",
    "make_llm": "engine.api.engine",
    "write_turns": "engine.cluster.ray.datasink",
}

__all__ = [
    "AsyncClient",
    "Client",
    "Cluster",
    "ClusterSettings",
    "Engine",
    "Memory",
    "Message",
    "Settings",
    "Turn",
    "UndertowError",
    "__version__",
    "connect",
    "export_parquet",
    "export_tables",
    "make_encoder",
    "make_llm",
    "write_turns",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    try:
        return getattr(import_module(f"undertow.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "undertow").partition(".")[0] == "undertow":
            raise
        from undertow.engine.base.extras import cure

        raise ImportError(f"undertow.{name}: {cure(missing)}", name=missing.name) from None
