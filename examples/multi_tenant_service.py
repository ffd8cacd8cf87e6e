"""Two customers of one service, each with a key for its own tenants: python examples/multi_tenant_service.py

Needs `pip install 'undertow[engine,serve]'`. It makes a store and keys in a temporary folder, starts
`undertow serve`, and ends it.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from undertow import Client, UndertowError

UNDERTOW = (sys.executable, "-m", "undertow.serving.cli")


def new_key(store: Path, customer: str) -> str:
    """A key for all tenants of one customer. It is shown this once."""
    command = (*UNDERTOW, "keys", "create", "--store", store, "--tenant-prefix", f"{customer}/")
    made = subprocess.run([*command, "--scope", "read", "--scope", "write"], check=True, capture_output=True)
    return re.search(rb"ut_\S+", made.stdout).group().decode()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="undertow-example-") as folder:
        store = Path(folder) / "store"
        acme, globex = new_key(store, "acme"), new_key(store, "globex")
        serve = [*UNDERTOW, "serve", "--store", store, "--port", "0"]
        with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as service:
            try:
                url = next(
                    found[0] for line in service.stderr if (found := re.search(r"http://[\d.:]+", line))
                )
                use(url, acme, globex)
            finally:
                service.terminate()  # SIGTERM: it finishes what is under way


def use(url: str, acme: str, globex: str) -> None:
    with Client(url, acme) as client:
        said = [{"role": "user", "content": "I signed up for the pottery course."}]
        client.add("acme/ann", said, timestamp="2026-05-08T13:56:00", metadata={"channel": "web"})
        found = client.search("acme/ann", "hobbies", filters={"channel": "web"})
        print("acme finds:", [hit.memory for hit in found.results])
    with Client(url, globex) as client:
        try:
            client.search("acme/ann", "hobbies")
        except UndertowError as refusal:
            print("globex is refused:", refusal)


if __name__ == "__main__":
    main()
