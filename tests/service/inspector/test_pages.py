"""The Inspector in a real Chromium, driven by one script of Node (pages.mjs).

playwright-core drives it from Node, as the browser and axe come by npm in any case: the Python package
`playwright` would bring a Node of its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.cluster.shard.supervisor import EngineParts

from ...support.service.http import at, serving
from ...support.service.node import packages_of

FOLDER = Path(__file__).parent
TIME_S = 300
PLANTED = (
    '<img src=x onerror="alert(1)"><img src="http://example.com/a.png"><script>alert(2)</script>'
    "<svg onload=alert(3)><style>*{background:url(http://example.com)}</style></svg>"
    '<a href="javascript:alert(4)">javascript:alert(5)</a> [x](http://example.com) {{ 7 * 7 }} "\' onfocus=x '
    f"\u202e{'wordwithoutanend' * 20}"
)
NAME = 'acme/<img src=x onerror=alert(6)>"{{ 7 * 7 }}'


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a browser saw on all pages, of a tenant whose every word is hostile."""
    modules = packages_of(FOLDER)
    parts = EngineParts(llm=lambda _: MockLLM(MockReplies()))
    message = {"role": "user", "name": PLANTED[:60]}
    more = {"session_id": PLANTED[:120], "metadata": {PLANTED[:40]: PLANTED}}
    with serving(tmp_path_factory.mktemp("store"), parts=parts) as service:
        key = service.key()
        client = service.client_of(key)
        for n in range(5):
            turn = {"messages": [message | {"content": f"{PLANTED} boat {n}"}], **more}
            assert client.post(at(NAME, "/memories"), json=turn).status_code == 200
        client.post(at(NAME, "/flush"))
        (memory, *_) = client.get(at(NAME, "/memories"), params={"kind": "episode"}).json()["results"]
        client.put(at(NAME, f"/memories/{memory['id']}"), json={"text": PLANTED[::-1] + PLANTED})
        client.post(at(NAME, "/flush"))
        asked = {"url": service.url, "key": key, "tenant": NAME, "memory": memory["id"], "query": "boat <b>"}
        given = json.dumps(asked | {"folder": str(modules / ".chromium")})
        run = subprocess.run(
            ["node", "pages.mjs"], cwd=FOLDER, input=given, capture_output=True, text=True, timeout=TIME_S
        )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_what_a_tenant_says_stays_text(seen: dict[str, Any]) -> None:
    assert seen["dialogs"] == seen["foreign"] == seen["made"] == []
    assert seen["console"] == [], "a violation of the policy is told on the console"


def test_the_keyboard_suffices(seen: dict[str, Any]) -> None:
    assert "/memories/" in seen["keyboard"]["path"]
    assert seen["keyboard"]["title"].startswith("turn ")
    assert seen["keyboard"]["after"] == "Sign in"


def test_both_widths_and_schemes_hold_no_barrier(seen: dict[str, Any]) -> None:
    assert seen["wide"] == [], "a page scrolls sideways"
    assert seen["violations"] == []
