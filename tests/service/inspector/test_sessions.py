"""The Inspector without a browser: sessions, rights and headers. test_guard.py has its routes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import KeyLimits, Scope
from undertow.serving.inspector import sessions, views
from undertow.serving.inspector.gate import HEADERS
from undertow.serving.inspector.sessions import Sessions

from ...support.service.http import Running, at, said, serving

PAGE = {"Accept": "text/html"}


def page(tenant: str, rest: str = "") -> str:
    return f"/inspect/tenants/{quote(tenant, safe='')}{rest}"


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    for name in ("ann", "bob"):
        client.post(at(name, "/memories"), json={"messages": said(f"the boat of {name}")})


def signed_in(running: Running, key: str, **headers: str) -> tuple[httpx2.Client, httpx2.Response]:
    """A browser after the form was sent; its cookies are its own."""
    browser = running.client_of(None)
    browser.headers.update(PAGE)
    sent = {"Origin": running.url, **headers}
    return browser, browser.post("/inspect/sign-in", data={"key": key}, headers=sent)


def test_a_session_stands_for_its_key(running: Running) -> None:
    browser, answer = signed_in(running, running.key(Scope.READ, tenants=("ann",)))
    assert (answer.status_code, answer.headers["location"]) == (303, "/inspect?signed-in")
    name, *flags = answer.headers["set-cookie"].split("; ")
    assert len(name.partition("=")[2]) == 43 and set(flags) == {
        "HttpOnly",
        "Path=/inspect",
        "SameSite=strict",
    }
    start = browser.get("/inspect")
    assert page("ann") in start.text and "bob" not in start.text
    timeline = browser.get(page("ann"))
    assert timeline.status_code == 200 and "the boat of ann" in timeline.text
    refused = [browser.get(page(name, rest)) for name in ("bob", "nobody") for rest in ("", "/search?q=boat")]
    assert {one.status_code for one in refused} == {403} and len({one.text for one in refused}) == 1
    (theirs,) = running.client().get(at("bob", "/memories")).json()["results"]
    assert browser.get(page("ann", f"/memories/{theirs['id']}")).status_code == 404
    assert browser.get("/inspect/health").status_code == 403
    for shown in (start, timeline, refused[0], browser.get("/inspect/style.css"), browser.get("/inspect/x")):
        assert HEADERS.items() <= {name.title(): value for name, value in shown.headers.items()}.items()
    assert browser.post("/inspect/sign-out", headers={"Origin": running.url}).status_code == 303
    browser.headers["Cookie"] = name  # signing out ends the session, not the cookie alone
    assert browser.get(page("ann")).status_code == 401


def test_a_session_ends_with_its_key_or_with_time(running: Running, monkeypatch: Any) -> None:
    key = running.key(Scope.READ)
    browser, _ = signed_in(running, key)
    assert browser.get("/inspect").status_code == 200
    KeyFile(running.folder / "keys.json").revoke(key.split("_")[1])
    ended = browser.get("/inspect")
    assert ended.status_code == 401 and "Your session has ended" in ended.text
    browser, _ = signed_in(running, running.key(Scope.READ))
    assert browser.get("/inspect").status_code == 200
    monkeypatch.setattr(sessions, "IDLE_S", 0.0)
    assert browser.get("/inspect").status_code == 401
    _, refused = signed_in(running, "ut_0123456789ab_" + "x" * 43)
    assert (
        refused.status_code == 401 and "not accepted" in refused.text and "set-cookie" not in refused.headers
    )


def test_a_form_is_taken_from_the_own_pages_alone(running: Running) -> None:
    for sent, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "same-origin"}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "memory.example", "Origin": "https://memory.example"}, 303),
    ):
        _, answer = signed_in(running, running.key(Scope.READ), **sent)
        assert answer.status_code == status, sent
        assert ("Secure" in answer.headers.get("set-cookie", "")) == ("Host" in sent)
    assert signed_in(running, "x" * 20_000)[1].status_code == 413


def test_pages_count_against_the_key_s_rate_and_fail_at_nothing(running: Running) -> None:
    browser, _ = signed_in(running, running.key(limits=KeyLimits(requests_per_s=0.001, burst=2)))
    assert [browser.get("/inspect").status_code for _ in range(2)] == [200, 429]
    browser, _ = signed_in(running, running.key())
    odd = {"?after=-2": 422, "?after=99": 200, "/search?q=%00": 200, "/search?q=x&k=0": 422}
    odd |= {"/search?q=%F0&since=x": 422, "/memories/%2E%2E": 404, "/search?q=x&since=&until=": 200}
    assert {rest: browser.get(page("ann", rest)).status_code for rest in odd} == odd
    found = browser.get("/inspect/open", params={"tenant": "a/../b?"}).headers["location"]
    assert found == page("a/../b?").replace(".", "%2E")


def test_sessions_are_bounded() -> None:
    now_s = [0.0]
    held = Sessions(clock_s=lambda: now_s[0])
    tokens = [held.open("one") for _ in range(sessions.MOST_OF_A_KEY + 1)]
    assert [held.key_of(str(token)) for token in tokens[:2]] == [None, "one"]
    opened = [held.open(f"key {n}") for n in range(sessions.MOST_SESSIONS)]
    assert opened.count(None) == sessions.MOST_OF_A_KEY
    now_s[0] = sessions.IDLE_S
    assert held.key_of(str(opened[0])) is None and held.open("another") is not None


def test_versions_differ_by_words() -> None:
    told = views.difference("the red boat", "the blue boat sails")
    assert told == [("same", "the "), ("gone", "red"), ("new", "blue"), ("same", " boat"), ("new", " sails")]


def test_without_the_option_there_is_no_inspector(tmp_path: Path) -> None:
    with serving(tmp_path, extend=None) as running:
        assert running.client().get("/inspect").status_code == 404


def test_the_newest_turns_are_shown_though_others_were_deleted(client: httpx2.Client) -> None:
    items = [{"messages": said(f"tale number {n}")} for n in range(60)]
    added = client.post(at("many", "/memories"), json={"items": items}).json()["items"]
    for one in added[:30]:
        client.delete(at("many", f"/memories/{one['results'][0]['id']}"))
    shown = client.get(page("many"), params={"newest": "true"}, headers=PAGE, follow_redirects=True).text
    assert "tale number 59" in shown and "tale number 25" not in shown
