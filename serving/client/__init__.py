"""The Python client of the service: `Client`, `AsyncClient`, what they answer and what they raise.

    with Client("http://localhost:8080", key) as client:
        client.add("ann", "I signed up for the pottery course.")
        for hit in client.search("ann", "hobbies").results:
            print(hit.score, hit.memory)

It loads httpx2 and pydantic and nothing of the engine. `_async/` is written by hand, `_sync/` is made of
it by `python -P serving/client/generate.py`.
"""

from undertow.engine.base.model import UndertowError

try:
    import httpx2 as httpx2
except ModuleNotFoundError as missing:
    if missing.name != "httpx2":
        raise
    raise UndertowError(
        "the client needs httpx2, which is not installed. Install it: pip install 'undertow[client]'"
    ) from None

from undertow.serving.client._async.client import AsyncClient
from undertow.serving.client._sync.client import Client
from undertow.serving.client.errors import (
    AuthError,
    BadRequest,
    Conflict,
    FieldProblem,
    Forbidden,
    NotFound,
    RateLimited,
    ServerError,
    ServiceError,
    TimedOut,
    TooLarge,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
)
from undertow.serving.client.results import (
    Added,
    AddedItem,
    Answer,
    Certificate,
    Changed,
    Found,
    Hit,
    Job,
    Memory,
    Page,
    Policy,
)
from undertow.serving.client.retries import Retries

__all__ = [
    "Added",
    "AddedItem",
    "Answer",
    "AsyncClient",
    "AuthError",
    "BadRequest",
    "Certificate",
    "Changed",
    "Client",
    "Conflict",
    "FieldProblem",
    "Forbidden",
    "Found",
    "Hit",
    "Job",
    "Memory",
    "NotFound",
    "Page",
    "Policy",
    "RateLimited",
    "Retries",
    "ServerError",
    "ServiceError",
    "TimedOut",
    "TooLarge",
    "Unavailable",
    "UnexpectedAnswer",
    "Unreachable",
]
