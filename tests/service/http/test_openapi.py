"""The OpenAPI document is complete, and responses to generated requests conform to it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from undertow.serving.auth.principal import Scope

from ...support.service.http import Running
from ...support.soak.runs import report

SOAK_EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "300"))
BOUNDS = {"max_body_bytes": 20_000, "stream_s": 0.1}
EVENT = re.compile(r"id: ([0-9a-f]{32})\nevent: ((?:memory|tenant|turn)\.[a-z]+)\ndata: (\{.*\})")
EVENT_FIELDS = {"id", "type", "tenant", "tenant_key", "time"}


@schemathesis.check
def body_conformance(ctx: Any, response: Any, case: Any) -> bool | None:
    """The body fits its schema. Of a stream, that is a string, which schemathesis takes for each event's."""
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        return openapi_checks.response_schema_conformance(ctx, response, case)
    *told, rest = response.content.decode().split("\n\n")
    assert told and not rest
    for block in told:
        if block == ":":
            continue
        found = EVENT.fullmatch(block)
        assert found is not None, block
        event = json.loads(found[3])
        assert event.keys() >= EVENT_FIELDS and (event["id"], event["type"]) == found.groups()[:2], block
    return None


PROMISES = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    body_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.unsupported_method,
    openapi_checks.ignored_auth,
]


@schemathesis.serializer("application/x-ndjson")
def lines(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def key(running: Running) -> str:
    return running.key(*Scope)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_described(running: Running, key: str, mode: GenerationMode) -> None:
    every_operation(running, key, mode, max_examples=6, derandomize=True)


@pytest.mark.soak
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_described_to_other_requests_each_time(
    running: Running, key: str, mode: GenerationMode
) -> None:
    report(requests=every_operation(running, key, mode, max_examples=SOAK_EXAMPLES))


def every_operation(running: Running, key: str, mode: GenerationMode, **settings: Any) -> int:
    """Check what is answered to requests of each operation; how many requests that were."""
    described = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    found: list[Any] = list(described.get_all_operations())
    operations = [one.ok() for one in found]
    assert len(operations) >= 24
    return sum(
        check(operation, key, mode, **settings)
        for operation in operations
        if mode is GenerationMode.POSITIVE or operation.body or list(operation.iter_parameters())
    )


def check(operation: Any, key: str, mode: GenerationMode, **settings: Any) -> int:
    """What the service answers to requests of this operation is as its description says."""
    requests = 0

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(deadline=None, database=None, **settings)
    def promises_hold(case: Any) -> None:
        nonlocal requests
        requests += 1
        case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, checks=PROMISES)

    promises_hold()
    return requests


@pytest.fixture(scope="module")
def document(running: Running) -> Any:
    return running.app.openapi()


def test_every_operation_is_described(document: Any) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert len(operation["description"]) > 30, (method, path)
            if path.startswith("/health"):
                assert operation["security"] == []
                continue
            assert "Needs a key with the scope" in operation["description"]
            assert {"401", "403", "413", "422", "429", "503"} <= operation["responses"].keys(), path
            for status, response in operation["responses"].items():
                if status >= "400":
                    assert list(response["content"]) == ["application/problem+json"], (path, status)


def fields_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Every field and parameter below a part of the document, with its name."""
    if isinstance(part, dict):
        yield from part.get("properties", {}).items()
        yield from ((of["name"], of) for of in part.get("parameters", ()))
    for below in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from fields_of(below)


def test_every_field_and_parameter_has_a_description(document: Any) -> None:
    named = {**document["paths"], **document["components"]["schemas"]}
    found = [(at, name, of) for at, part in named.items() for name, of in fields_of(part)]
    assert len(found) >= 193
    for at, name, of in found:
        schema = of.get("schema", of)
        assert any(one.get("description") for one in (of, schema, *schema.get("anyOf", ()))), (at, name)
