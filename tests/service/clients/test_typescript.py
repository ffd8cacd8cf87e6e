"""The TypeScript client: generated of the service's document, compiled, and run under node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from undertow.serving.auth.principal import Scope

from ...support.service.http import serving
from ...support.service.node import packages_of

CLIENT = Path(__file__).resolve().parents[3] / "serving" / "client" / "typescript"
USE = """
import { undertow, UndertowError } from "./index.js";

const [url, key] = process.argv.slice(2);
const client = undertow(url!, key);
const params = { path: { tenant: "acme/ann" } };
const messages = [{ role: "user", content: "I signed up for the pottery course." }];
const added = await client.POST("/v1/tenants/{tenant}/memories", { params, body: { messages } });
const { data } = await client.POST("/v1/tenants/{tenant}/search", { params, body: { query: "pottery" } });
const hit = data!.results[0]!;
console.log(added.data!.results![0]!.event, hit.kind, hit.memory);
try {
  await client.GET("/v1/tenants/{tenant}/stats", { params: { path: { tenant: "globex/bob" } } });
} catch (error) {
  if (error instanceof UndertowError) console.log(error.status, error.message);
}
// @ts-expect-error a body without its query does not compile
client.POST("/v1/tenants/{tenant}/search", { params, body: {} }).catch(() => undefined);
"""


def test_it_is_generated_compiled_and_run(tmp_path: Path) -> None:
    modules = packages_of(CLIENT)
    folder = Path(shutil.copytree(CLIENT, tmp_path / "client", ignore=shutil.ignore_patterns("node_modules")))
    (folder / "node_modules").symlink_to(modules)
    readme = (CLIENT / "README.md").read_text().split("```ts\n")[1].split("```")[0]
    (folder / "src" / "use.ts").write_text("declare const process: { argv: string[] };\n" + USE)
    (folder / "src" / "readme.ts").write_text(readme.replace("undertow-client", "./index.js"))
    with serving(tmp_path / "store") as service:
        ran(folder, "npm", "run", "generate", "--", f"{service.url}/openapi.json")
        ran(folder, "npm", "run", "build")
        out = ran(folder, "node", "dist/use.js", service.url, service.key(*Scope, prefix="acme/"))
    assert out.splitlines() == [
        "ADD turn user: I signed up for the pottery course.",
        "403 This key lacks the scope read, or is not for this tenant. Ask for a key that has both.",
    ]


def ran(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
