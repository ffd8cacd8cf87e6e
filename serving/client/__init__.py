"""The Python client of the service: `Client`, `AsyncClient`, their results and their errors.

    with Client("http://localhost:8080", key) as client:
        client.add("ann", "I signed up for the pottery course.")
        for hit in client.search("ann", "hobbies").results:
            print(hit.score, hit.memory)

It loads httpx2 and pydantic and nothing heavy of the engine. `_async/` is written by hand;
`python -P serving/client/generate.py` makes `_sync/` of it.
"""

from undertow.serving.client._async.client import AsyncClient as AsyncClient
from undertow.serving.client._sync.client import Client as Client
from undertow.serving.client.errors import AuthError as AuthError
from undertow.serving.client.errors import BadRequest as BadRequest
from undertow.serving.client.errors import Conflict as Conflict
from undertow.serving.client.errors import FieldProblem as FieldProblem
from undertow.serving.client.errors import Forbidden as Forbidden
from undertow.serving.client.errors import NotFound as NotFound
from undertow.serving.client.errors import RateLimited as RateLimited
from undertow.serving.client.errors import ServerError as ServerError
from undertow.serving.client.errors import ServiceError as ServiceError
from undertow.serving.client.errors import TimedOut as TimedOut
from undertow.serving.client.errors import TooLarge as TooLarge
from undertow.serving.client.errors import Unavailable as Unavailable
from undertow.serving.client.errors import UnexpectedAnswer as UnexpectedAnswer
from undertow.serving.client.errors import Unreachable as Unreachable
from undertow.serving.client.results import Added as Added
from undertow.serving.client.results import AddedItem as AddedItem
from undertow.serving.client.results import Answer as Answer
from undertow.serving.client.results import Certificate as Certificate
from undertow.serving.client.results import Changed as Changed
from undertow.serving.client.results import Explanation as Explanation
from undertow.serving.client.results import Found as Found
from undertow.serving.client.results import Hit as Hit
from undertow.serving.client.results import Job as Job
from undertow.serving.client.results import LeftOut as LeftOut
from undertow.serving.client.results import Memory as Memory
from undertow.serving.client.results import Page as Page
from undertow.serving.client.results import Policy as Policy
from undertow.serving.client.retries import Retries as Retries
