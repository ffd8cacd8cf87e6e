"""The service as its container runs it: a user without root, a read-only root, HOME for caches alone.

In a mount namespace of its own, with all files read-only but three folders. Of all capabilities it has
the one to read, since the interpreter and the folders of tests may lie where other users must not look.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service's packages are not installed")

from numba.core.caching import _CacheLocator

import undertow
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import NO_LIMITS, Scope, TenantScope

USER = 10001
ROOT = Path(undertow.__file__).parent
# $1 and the two after it stay writable
CONFINE = """
for folder in "$1" "$2" "$3"; do mount --bind "$folder" "$folder"; done; shift 3
mount -o remount,ro,bind / || exit 77
if mountpoint -q /tmp; then mount -o remount,ro,bind /tmp; fi
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search "$@"
"""
CONFINED = ["unshare", "--mount", "--propagation", "private", "bash", "-ec", CONFINE, "bash"]


def confined(folder: Path, *command: str) -> subprocess.Popen[str]:
    """Start it where only data, home and tmp of the folder can be written to."""
    _, home, tmp = writable = [str(folder / name) for name in ("data", "home", "tmp")]
    env = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": tmp, "NUMBA_CACHE_DIR": f"{home}/.cache/numba"}
    out: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*CONFINED, *writable, *command], env=env, cwd="/", **out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the kernels that this machine has compiled, so that nobody waits for them again."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mountpoint"))):
        pytest.skip("a mount namespace takes root and util-linux")
    for name in ("data", "home", "tmp"):
        (tmp_path / name).mkdir()
    subpath: Any = _CacheLocator.get_suitable_cache_subpath
    for cached in (ROOT / "kernels").rglob("__pycache__/*.nb[ci]"):
        of = subpath(str(cached.parent.parent / "x.py"))
        place = tmp_path / "home/.cache/numba" / of
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(cached, place)
    return tmp_path


def test_the_service_runs_without_root_on_a_read_only_root(folder: Path) -> None:
    store = folder / "data/store"
    store.mkdir()
    every = TenantScope((), None, all_tenants=True)
    key = KeyFile(store / "keys.json").create(every, (Scope.READ, Scope.WRITE), limits=NO_LIMITS)
    for path in (folder / "data", *folder.rglob("*")):
        os.chown(path, USER, USER)
    probe = confined(
        folder, "bash", "-c", f"id -u; touch {ROOT}/x /tmp/x {folder}/x; touch {store}/x && rm {store}/x"
    )
    told = probe.communicate(timeout=30)[0]
    if probe.returncode == 77:
        pytest.skip(f"no mount namespace here: {told}")
    assert (probe.returncode, told.splitlines()[0], told.count("Read-only file system")) == (0, "10001", 3), (
        told
    )
    serve = ("-m", "undertow.serving.cli", "serve", "--store", str(store), "--port", "0", "--llm", "off")
    service = confined(folder, sys.executable, *serve)
    assert service.stdout is not None
    lines: list[str] = []
    try:
        while not lines or "Ready on" not in lines[-1]:
            lines.append(service.stdout.readline())
            assert lines[-1], f"it ended: {lines}"
        with undertow.Client(re.findall(r"http://[\d.:]+", lines[-1])[0], key.text) as client:
            client.add("ann", "the boat needs new planks")
            assert client.search("ann", "boat").results[0].memory == "user: the boat needs new planks"
    finally:
        service.terminate()
        lines += service.communicate(timeout=60)[0].splitlines()
    assert service.returncode == 0
    assert not re.search("Read-only|Errno|Traceback|arning", "".join(lines)), "".join(lines)
