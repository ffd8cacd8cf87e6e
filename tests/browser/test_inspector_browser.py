"""The Inspector in a real Chromium, driven by one script of Node (pages.mjs).

playwright-core drives it from Node, as the browser and axe come by npm in any case: the Python package
`playwright` would bring a Node of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.cluster.shard.supervisor import EngineParts

from ..support.service.http import at, serving

FOLDER = Path(__file__).parent
TIME_S = 60
PLANTED = (
    '<img src=x onerror="alert(1)"><img src="http://example.com/a.png"><script>alert(2)</script>'
    "<svg onload=alert(3)><style>*{background:url(http://example.com)}</style></svg>"
    '<a href="javascript:alert(4)">javascript:alert(5)</a> [x](http://example.com) {{ 7 * 7 }} "\' onfocus=x '
    f"\u202e{'wordwithoutanend' * 20}"
)
# a name in a path is at most so long
NAME = 'acme/<img src=x onerror=alert(6)>"{{ 7 * 7 }}'


def missing(what: str) -> None:
    """On CI it must be there; elsewhere the tests are skipped without it."""
    words = f"{what} Then: make {FOLDER.relative_to(FOLDER.parents[1])}/node_modules/.stamp"
    pytest.fail(words, pytrace=False) if os.environ.get("CI") else pytest.skip(words)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a browser saw on all pages, of a tenant whose every word is hostile."""
    node = shutil.which("node")
    if node is None:
        missing("Install Node 20 or newer.")
    if not (FOLDER / "node_modules/playwright-core").exists():
        missing("The browser's packages are not installed.")
    parts = EngineParts(llm=lambda _: MockLLM(MockReplies()))
    with serving(tmp_path_factory.mktemp("store"), parts=parts) as service:
        key = service.key()
        client = service.client_of(key)
        added = [
            client.post(
                at(NAME, "/memories"),
                json={
                    "messages": [{"role": "user", "name": PLANTED[:60], "content": f"{PLANTED} boat {n}"}],
                    "session_id": PLANTED[:120],
                    "metadata": {PLANTED[:40]: PLANTED},
                },
            )
            for n in range(5)
        ]
        assert [one.status_code for one in added] == [200] * 5
        client.post(at(NAME, "/flush"))
        (memory, *_) = client.get(at(NAME, "/memories"), params={"kind": "episode"}).json()["results"]
        client.put(at(NAME, f"/memories/{memory['id']}"), json={"text": PLANTED[::-1] + PLANTED})
        client.post(at(NAME, "/flush"))
        asked = {"url": service.url, "key": key, "tenant": NAME, "memory": memory["id"], "query": "boat <b>"}
        asked["chromium"] = str(FOLDER / "node_modules/.chromium")
        run = subprocess.run(
            [str(node), "pages.mjs"],
            cwd=FOLDER,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=TIME_S,
        )
        assert run.returncode == 0, run.stderr
        yield json.loads(run.stdout)


def test_what_a_tenant_says_stays_text(seen: dict[str, Any]) -> None:
    assert seen["dialogs"] == seen["foreign"] == seen["made"] == []
    assert seen["console"] == [], "a violation of the policy is told on the console"


def test_the_keyboard_suffices(seen: dict[str, Any]) -> None:
    assert "/memories/" in seen["keyboard"]["path"]
    assert seen["keyboard"]["title"].startswith("turn ")
    assert seen["keyboard"]["after"] == "Sign in"


def test_no_serious_barrier_at_either_width(seen: dict[str, Any]) -> None:
    assert seen["violations"] == []


def test_no_page_is_wider_than_its_window(seen: dict[str, Any]) -> None:
    assert seen["wide"] == []
