"""The file of the keys: what it accepts, who may write it, and several processes, also killed ones."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.storage.location import DRAFT
from undertow.serving.auth.authenticator import Authenticator
from undertow.serving.auth.key_file import Key, KeyFile, KeyFileError, PreviousSecret, parse
from undertow.serving.auth.principal import KeyLimits, Scope, TenantScope

from ...support.service.clock import Clock
from .test_keys import ADA, ALL, READ, reaches, reason

moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
all_limits = st.one_of(
    st.just(KeyLimits()),
    st.builds(
        KeyLimits,
        requests_per_s=st.floats(1e-6, 1e6),
        burst=st.none() | st.integers(1, 10**6),
        tokens_per_day=st.none() | st.integers(0, 10**12),
    ),
)
all_keys = st.builds(
    Key,
    id=st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
    digest=digests,
    reach=reaches,
    scopes=st.lists(st.sampled_from(Scope), min_size=1, unique=True).map(tuple),
    created_at=moments,
    label=st.text("ab é🦔", max_size=8),
    limits=all_limits,
    expires_at=st.none() | moments,
    rotated_at=st.none() | moments,
    revoked_at=st.none() | moments,
    former=st.lists(st.builds(PreviousSecret, digests, moments), max_size=2).map(tuple),
)


@pytest.mark.parametrize("what", ["cut off", "gone", "no rights"])
def test_a_broken_file_leaves_the_last_good_keys_and_is_told_once(
    what: str, file: KeyFile, keys: Authenticator, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "no rights" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    one, two = file.create(ADA, READ), file.create(ADA, READ)
    file.revoke(two.key.id)
    good = file.path.read_bytes()
    keys.check(one.text)
    match what:
        case "cut off":
            file.path.write_bytes(good[: len(good) // 2])
        case "gone":
            file.path.unlink()
        case "no rights":
            file.path.chmod(0)
    for _ in range(3):
        assert keys.check(one.text).reach == ADA
        assert reason(keys, two.text).endswith("revoked")
    assert keys.trouble is not None and str(file.path) in keys.trouble
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    if what == "cut off":
        with pytest.raises(KeyFileError, match="Restore it from a backup"):
            Authenticator(file.path)
        with pytest.raises(KeyFileError, match="Restore it from a backup"):
            file.create(ADA, READ)
        assert len(file.path.read_bytes()) < len(good), "what is broken is not written over"
    file.path.unlink(missing_ok=True)
    file.path.write_bytes(good)
    file.revoke(one.key.id)
    assert reason(keys, one.text).endswith("revoked")
    assert keys.trouble is None


@given(st.lists(all_keys, max_size=3, unique_by=lambda key: key.id))
def test_keys_are_read_as_they_were_written(some: list[Key]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = KeyFile(Path(folder) / "keys.json")
        file._write(some)
        assert list(file.read().values()) == some


def test_the_file_is_its_owner_s_alone_and_durable(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(tmp_path / "deep" / "keys.json", now=clock)
    synced: list[str] = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        assert not synced[-1].endswith(DRAFT) or stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
        really(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("names of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    made = file.create(ADA, READ)
    file.path.chmod(0o644)
    file.revoke(made.key.id)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert {str(tmp_path), str(tmp_path / "deep")} <= set(synced)
    assert sum(name.endswith(DRAFT) for name in synced) == 2
    assert sorted(p.name for p in file.path.parent.iterdir()) == [".keys.json.lock", "keys.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_replaced(file: KeyFile) -> None:
    file.create(ADA, READ)
    os.chown(file.path, 12345, 12345)
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        file.create(ADA, READ)
    assert len(file.read()) == 1


def test_what_is_no_key_file_is_told_without_quoting_it(file: KeyFile) -> None:
    file.create(ADA, READ, limits=KeyLimits(requests_per_s=1))
    good = orjson.loads(file.path.read_bytes())
    digest = good["keys"][0]["digest"]
    spoilt: list[tuple[object, str]] = [
        ([], "no key file"),
        ({"format_version": 2, "later": 1}, "format version 2.*Install the Undertow"),
        ({"format_version": 1}, "keys: Field required"),
        ({**good, "more": 1}, "more"),
        ({**good, "keys": good["keys"] * 2}, "two keys have the same id"),
    ]
    for name, value, told in [
        ("digest", digest[:-1], "64 hexadecimal"),
        ("digest", 1, "digest"),
        ("scopes", [], "scopes|one or more"),
        ("scopes", ["read", "fly"], "scopes"),
        ("reach", {"tenants": [], "prefix": None, "all_tenants": False}, "give one"),
        ("reach", {"tenants": ["ada"], "all_tenants": 1}, "all_tenants"),
        ("created_at", "2026-05-08T13:56:00", "zone"),
        ("expires_at", "soon", "expires_at"),
        ("id", "ada", "12 hexadecimal"),
        ("limits", {"requests_per_s": -1}, "requests_per_s"),
        ("unheard_of", 1, "unheard_of"),
    ]:
        spoilt.append(({**good, "keys": [{**good["keys"][0], name: value}]}, told))
    for contents, told in spoilt:
        with pytest.raises(KeyFileError, match=told) as error:
            parse(orjson.dumps(contents), file.path)
        assert digest[:20] not in str(error.value) and str(file.path) in str(error.value)


def test_an_erased_name_leaves_no_byte_and_its_key_goes(file: KeyFile, keys: Authenticator) -> None:
    alone, shared = (
        file.create(TenantScope(("eve-17",)), READ),
        file.create(TenantScope(("eve-17", "bo")), READ),
    )
    others = [file.create(reach, READ) for reach in (ADA, ALL, TenantScope(prefix="ev"))]
    assert file.forget(lambda name: name == "eve-17") == [alone.key.id, shared.key.id]
    assert b"eve-17" not in b"".join(p.read_bytes() for p in file.path.parent.iterdir())
    assert reason(keys, alone.text).endswith("no such key")
    assert keys.check(shared.text).reach == TenantScope(("bo",))
    assert [keys.check(made.text).reach for made in others] == [ADA, ALL, TenantScope(prefix="ev")]
    before = file.path.stat()
    assert file.forget(lambda name: name == "eve-17") == []
    assert file.path.stat() == before, "nothing to change, nothing written"


# ---- several processes, and killed ones

CREATE = """
import sys
from pathlib import Path
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Scope, TenantScope

file = KeyFile(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    print(file.create(TenantScope(all_tenants=True), [Scope.READ]).text, flush=True)
"""

KILLED = """
import os, signal, sys

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

fsync, fdopen = os.fsync, os.fdopen

class Half:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        die()

def arm():
    match sys.argv[3]:
        case "half written":
            os.fdopen = lambda *args: Half(fdopen(*args))
        case "written":
            os.fsync = die
        case "in its place":
            count = iter(range(9))
            os.fsync = lambda descriptor: die() if next(count) else fsync(descriptor)
"""


def start(path: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CREATE, str(path), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_create_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    running = [start(path, 25) for _ in range(2)]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=120)[0] for process in running]
    texts = "".join(printed).split()
    assert len(texts) == 50
    keys = Authenticator(path)
    assert {keys.check(text).key_id for text in texts} == KeyFile(path).read().keys()
    keys.close()


@pytest.mark.parametrize("moment", ["half written", "written", "in its place"])
def test_a_kill_in_the_middle_of_a_write_leaves_a_readable_file(moment: str, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    kept = file.create(ADA, READ)
    program = KILLED + CREATE.replace('print("ready"', 'arm(); print("ready"')
    done = subprocess.run(
        [sys.executable, "-c", program, str(file.path), "1", moment],
        input="go\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n"), done.stderr
    left = sorted(p.suffix for p in tmp_path.iterdir() if p.name.startswith(".keys.json."))
    assert left == ([DRAFT, ".lock"] if moment != "in its place" else [".lock"])
    after = file.read()
    assert len(after) == (2 if moment == "in its place" else 1)
    assert after[kept.key.id] == kept.key
    made = file.create(ADA, READ)
    assert file.read().keys() == {*after, made.key.id}
    assert not list(tmp_path.glob(f".*{DRAFT}")), "the next writer clears away"
