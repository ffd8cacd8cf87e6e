"""Which extra of the package brings what is missing."""

from __future__ import annotations

# by the module that is imported; all others are the engine's
EXTRA_OF = {
    "ray": "cluster",
    **dict.fromkeys(("fastapi", "httptools", "opentelemetry", "prometheus_client", "uvicorn"), "serve"),
    **dict.fromkeys(("matplotlib", "nltk"), "eval"),
    **dict.fromkeys(("confluent_kafka", "redis"), "streams"),
    **dict.fromkeys(("agents", "langgraph", "llama_index"), "adapters"),
    "cupy": "gpu",
}


def cure(missing: ImportError) -> str:
    """What to install for a module that was not found."""
    module = (missing.name or "").partition(".")[0]
    return f"{module} is not installed: pip install 'undertow[{EXTRA_OF.get(module, 'engine')}]'"
