"""Keys: what each allows, and how secrets change under a running service."""

from __future__ import annotations

import hmac
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from undertow.serving.auth import authenticator
from undertow.serving.auth.authenticator import Authenticator, KeyRefused
from undertow.serving.auth.key_file import (
    KEY_TEXT,
    Key,
    KeyFile,
    KeyFileError,
    describe,
    parse,
)
from undertow.serving.auth.principal import KeyLimits, Principal, Scope, TenantScope

from ...support.service.clock import NOON, Clock

ADA = TenantScope(("ada",))
READ = (Scope.READ,)
ALL = TenantScope(all_tenants=True)

# letters that JSON escapes, that are one in other normal forms, and that lie beyond 16 bits
names = st.text('ab/é\u0301"\\\n🦔', min_size=1, max_size=4)
reaches = st.one_of(
    st.builds(TenantScope, st.lists(names, min_size=1, max_size=3).map(tuple)),
    st.builds(TenantScope, prefix=names),
    st.just(ALL),
)


def reason(keys: Authenticator, text: str) -> str:
    with pytest.raises(KeyRefused) as refused:
        keys.check(text)
    return refused.value.reason


# ---- what a key may do


@given(
    reaches,
    st.sets(st.sampled_from(Scope), min_size=1),
    st.sampled_from(Scope),
    st.none() | st.text("ab/é🦔", max_size=5),
)
def test_a_principal_may_what_its_scopes_and_tenants_say(
    reach: TenantScope, scopes: set[Scope], scope: Scope, tenant: str | None
) -> None:
    bound = [*reach.tenants]
    expected = scope in scopes and (
        reach.all_tenants
        or tenant in bound
        or (reach.prefix is not None and tenant is not None and tenant[: len(reach.prefix)] == reach.prefix)
    )
    assert Principal("0" * 12, "", reach, frozenset(scopes), KeyLimits()).may(scope, tenant) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: TenantScope(),
        lambda: TenantScope(("ada",), all_tenants=True),
        lambda: TenantScope(("ada",), prefix="a"),
        lambda: TenantScope(prefix="a", all_tenants=True),
        lambda: TenantScope(prefix=""),
        lambda: TenantScope(("",)),
        lambda: TenantScope(("ada", "\x00")),
        lambda: TenantScope(prefix="\ud800"),
        lambda: KeyLimits(requests_per_s=0),
        lambda: KeyLimits(requests_per_s=float("nan")),
        lambda: KeyLimits(requests_per_s=float("inf")),
        lambda: KeyLimits(requests_per_s=1, burst=0),
        lambda: KeyLimits(burst=5),
        lambda: KeyLimits(tokens_per_day=-1),
    ],
)
def test_what_no_key_can_be_bound_to_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"give|name the owner"):
        make()


def test_a_key_without_a_scope_or_that_has_expired_is_not_made(file: KeyFile) -> None:
    for scopes, expires_at, label in (
        ((), None, ""),
        ((Scope.READ, Scope.READ), None, ""),
        (READ, NOON, ""),
        (READ, None, "two\nlines"),
        (READ, datetime(2027, 1, 1), ""),
    ):
        with pytest.raises(ValueError, match=r"one or more|expire|label|zone"):
            file.create(ADA, scopes, expires_at=expires_at, label=label)
    assert file.read() == {}


# ---- checks


def test_a_key_is_accepted_as_what_it_was_made(file: KeyFile, keys: Authenticator) -> None:
    limits = KeyLimits(requests_per_s=2.5, tokens_per_day=1_000)
    made = file.create(ADA, [Scope.READ, Scope.WRITE], label="ada's app", limits=limits)
    form = KEY_TEXT.fullmatch(made.text)
    assert form is not None and form[1] == made.key.id
    assert keys.check(made.text) == Principal(
        made.key.id, "ada's app", ADA, frozenset({Scope.READ, Scope.WRITE}), limits
    )
    assert limits.burst_size == 3
    secrets = {file.create(ADA, READ).text.split("_", 2)[2] for _ in range(20)}
    assert len(secrets) == 20 and {len(secret) * 6 // 8 for secret in secrets} == {32}, "256 random bits"


def test_without_a_key_nothing_works(keys: Authenticator, file: KeyFile) -> None:
    assert reason(keys, "") == reason(keys, "ut_") == "not of a key's form"
    assert reason(keys, f"ut_{'0' * 12}_{'A' * 43}") == f"{'0' * 12}: no such key"
    assert keys.trouble is None and not file.path.exists()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Authenticator, str]]:
    """One key for all examples of a property."""
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")
    text = file.create(ADA, READ).text
    opened = Authenticator(file.path)
    yield opened, text
    opened.close()


@given(data=st.data())
@settings(max_examples=60)
def test_a_text_that_differs_in_one_letter_is_refused(
    shared: tuple[Authenticator, str], data: st.DataObject
) -> None:
    keys, text = shared
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("abcdef0123456789ABCDEF-_\n é").filter(lambda c: c != text[at]))
    assert keys.check(text).reach == ADA
    for wrong in (text[:at] + letter + text[at + 1 :], text[:at] + text[at + 1 :], text + letter):
        with pytest.raises(KeyRefused):
            keys.check(wrong)


def test_an_unknown_id_costs_a_comparison_too(
    file: KeyFile, keys: Authenticator, calls_of: Callable[..., list[int]]
) -> None:
    made = file.create(ADA, READ)
    compared = calls_of(hmac, "compare_digest", lambda one, other: len(one) + len(other))
    for key_id in (made.key.id, "0" * 12):
        assert reason(keys, f"ut_{key_id}_{'A' * 43}")
    assert compared == [128, 128]


def test_a_digest_under_another_id_opens_nothing(file: KeyFile, keys: Authenticator) -> None:
    """Whoever may write one record, but not make a secret, gains nothing by copying another's digest."""
    one, other = file.create(ADA, READ), file.create(ALL, [Scope.ADMIN])
    contents = orjson.loads(file.path.read_bytes())
    contents["keys"][1]["digest"] = contents["keys"][0]["digest"]
    file.path.write_bytes(orjson.dumps(contents))
    assert keys.check(one.text).reach == ADA
    secret = one.text.split("_", 2)[2]
    assert reason(keys, f"ut_{other.key.id}_{secret}") == f"{other.key.id}: wrong secret"


def test_the_caller_is_not_told_why_and_the_log_is(file: KeyFile, keys: Authenticator, clock: Clock) -> None:
    revoked, expiring, rotated = (
        file.create(ADA, READ, expires_at=NOON + timedelta(hours=1) if n == 1 else None) for n in range(3)
    )
    file.revoke(revoked.key.id)
    file.rotate(rotated.key.id, timedelta(seconds=60))
    clock.pass_s(3600)
    texts = {
        "revoked": revoked.text,
        "expired": expiring.text,
        "former secret, whose time of grace is over": rotated.text,
        "wrong secret": f"ut_{rotated.key.id}_{'A' * 43}",
        "no such key": f"ut_{'0' * 12}_{'A' * 43}",
    }
    told = set()
    for why, text in texts.items():
        with pytest.raises(KeyRefused) as refused:
            keys.check(text)
        assert refused.value.reason == f"{text[3:15]}: {why}"
        told.add(str(refused.value))
    assert len(told) == 1


def test_no_secret_is_shown_logged_or_stored(
    file: KeyFile, keys: Authenticator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = file.create(ADA, READ)
    again = file.rotate(made.key.id, timedelta(hours=1))
    texts = [made.text, again.text]
    shown = [repr(made), repr(again), repr(again.key), str(again), repr(describe(again.key, NOON))]
    for text in texts:
        shown.append(repr(keys.check(text)))
        with pytest.raises(KeyRefused) as refused:
            keys.check(text[:-1] + ("A" if text[-1] != "A" else "B"))
        shown += [repr(refused.value), str(refused.value), refused.value.reason]
    with pytest.raises(KeyFileError) as unknown:
        file.revoke(made.text)
    shown.append(str(unknown.value))
    file.path.write_bytes(file.path.read_bytes().replace(b'"read"', b'"reed"'))
    keys.check(again.text)
    assert keys.trouble is not None and "scopes" in keys.trouble
    shown += [keys.trouble, caplog.text]
    everything = "\n".join([*shown, file.path.read_text()])
    for text in texts:
        secret = text.split("_", 2)[2]
        assert secret[:20] not in everything and secret[-20:-1] not in everything
    assert not re.search(r"[0-9a-f]{64}", "\n".join(shown)), "nor a digest"


# ---- rotation and revocation under a running service


class Service(RuleBasedStateMachine):
    """Any changes in any order: what a running `Authenticator` says is what was promised for each secret."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        path = Path(self.folder.name) / "keys.json"
        self.file, self.keys = KeyFile(path, now=self.clock), Authenticator(path, now=self.clock)
        # each text: its key, and until when it holds
        self.until: dict[str, tuple[str, datetime]] = {}
        self.ended: set[str] = set()

    def teardown(self) -> None:
        self.keys.close()
        self.folder.cleanup()

    @rule(life_s=st.none() | st.integers(1, 50))
    def create(self, life_s: int | None) -> None:
        ends = None if life_s is None else self.clock.now + timedelta(seconds=life_s)
        made = self.file.create(ADA, READ, expires_at=ends)
        self.until[made.text] = made.key.id, ends or datetime.max.replace(tzinfo=UTC)

    @precondition(lambda self: self.until)
    @rule(data=st.data(), grace_s=st.integers(0, 40))
    def rotate(self, data: st.DataObject, grace_s: int) -> None:
        key_id = data.draw(st.sampled_from([key_id for key_id, _ in self.until.values()]))
        mine = {text: until for text, (owner, until) in self.until.items() if owner == key_id}
        newest = list(mine)[-1]
        if key_id in self.ended or mine[newest] <= self.clock.now:
            with pytest.raises(KeyFileError, match="Create a new one"):
                self.file.rotate(key_id, timedelta(seconds=grace_s))
            return
        made = self.file.rotate(key_id, timedelta(seconds=grace_s))
        graced = self.clock.now + timedelta(seconds=grace_s)
        self.until |= {text: (key_id, min(until, graced)) for text, until in mine.items()}
        self.until[made.text] = key_id, mine[newest]

    @precondition(lambda self: self.until)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        key_id = data.draw(st.sampled_from([key_id for key_id, _ in self.until.values()]))
        self.file.revoke(key_id)
        self.ended.add(key_id)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.clock.pass_s(seconds)

    @invariant()
    def each_secret_holds_as_long_as_was_promised(self) -> None:
        for text, (key_id, until) in self.until.items():
            if key_id not in self.ended and until > self.clock.now:
                assert self.keys.check(text).key_id == key_id
            else:
                assert reason(self.keys, text)


TestService = Service.TestCase
TestService.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_changes_in_quick_succession_are_all_seen(file: KeyFile, keys: Authenticator) -> None:
    """Two files may share size, time and inode number, if the first is removed before the second is made."""

    def rotate() -> str:
        text = file.rotate(made.key.id, timedelta(0)).text
        os.utime(file.path, ns=(10**18, 10**18))  # as if the file system's clock stood still
        return text

    made = file.create(ADA, READ)
    text = rotate()
    for _ in range(20):
        assert keys.check(text).key_id == made.key.id
        former, text = rotate(), rotate()
        assert keys.check(text).key_id == made.key.id
        assert reason(keys, former)


def test_a_revoked_key_keeps_the_time_of_its_first_end(file: KeyFile, clock: Clock) -> None:
    made = file.create(ADA, READ)
    clock.pass_s(5)
    first = file.revoke(made.key.id)
    clock.pass_s(5)
    assert file.revoke(made.key.id) == first == file.read()[made.key.id]
    assert first.revoked_at == NOON + timedelta(seconds=5)


def test_a_check_during_a_read_of_the_file_uses_the_new_keys(
    file: KeyFile, keys: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = file.create(ADA, READ)
    keys.check(made.text)
    file.revoke(made.key.id)
    reading, really = threading.Event(), parse

    def parse_slowly(data: bytes, path: Path) -> dict[str, Key]:
        reading.set()
        time.sleep(0.2)
        return really(data, path)

    monkeypatch.setattr(authenticator, "parse", parse_slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(reason, keys, made.text)
        assert reading.wait(10)
        assert reason(keys, made.text).endswith("revoked")
        assert first.result().endswith("revoked")


def test_many_threads_check_while_keys_change(file: KeyFile, keys: Authenticator) -> None:
    steady = file.create(ADA, READ)
    stop = False

    def check() -> int:
        count = 0
        while not stop:
            keys.check(steady.text)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        counts = [pool.submit(check) for _ in range(4)]
        changing = [file.create(ADA, READ) for _ in range(20)]
        stop = True
    assert all(future.result() for future in counts)
    assert {keys.check(made.text).key_id for made in changing} == {made.key.id for made in changing}
