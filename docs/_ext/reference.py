"""Writes the pages of docs/reference from the code, before Sphinx reads the pages.

They are made at every build and never committed. ValueError: a setting, an option, a route or a metric has
no words, so nothing could be said of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import typer
from formats import formats
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from sphinx.application import Sphinx

import undertow
from undertow.engine.base.config import Settings
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving import cli
from undertow.serving.cli.errors import EXIT_CODES, Exit
from undertow.serving.http import problems
from undertow.serving.http.app import make_app
from undertow.serving.http.openapi import STATUSES
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.mcp.tools import TOOLS
from undertow.serving.telemetry.metrics import HTTPMetrics, ShardCollector

MADE = "This page is made from the code.\n"
SETTINGS = {"Engine": Settings, "Service": ServiceSettings, "Cluster": ClusterSettings}
TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text"}
BOUNDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below", "pattern": "like"}
MEMBERS = "\n   :members:\n   :undoc-members:\n   :inherited-members:\n"
METRIC = ("name", "type", "documentation")
MARKDOWN = re.compile(r"\]\((\.\./[^)#]+\.md)")
VARIES = "The text says what is wrong, and what to do."
WHAT_TO_DO = {
    0: "",
    1: "Read the message: it names the cause and the cure. `undertow doctor` examines a store.",
    2: "Read the message: it names the option or the setting. Each command has `--help`.",
    3: "Correct the lines that the messages name, and give them again. `ingest` has stored the others, "
    "except what `--strict` left out; `import` has stored nothing.",
    4: "Start the server, or correct its settings. `undertow drain` then does the work that waits.",
    130: "Run the command again; `ingest` with `--resume`.",
}


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", lambda app: write(Path(app.srcdir, "reference")))
    app.connect("source-read", adapt)
    return {"parallel_read_safe": True}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    pages = {"settings.rst": settings, "commands.md": commands, "http.md": http}
    pages |= {"metrics.md": metrics, "errors.md": errors, "formats.md": file_formats, "mcp.md": mcp}
    for name, parts in {**pages, "python.rst": python}.items():
        (folder / name).write_text("\n".join(parts()))


def adapt(app: Sphinx, name: str, text: list[str]) -> None:
    """What pages need here and not on GitHub: the list of decisions, and Markdown outside docs/ as a file."""
    if name == "decisions/README":
        text[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    root, page = Path(app.srcdir).resolve(), Path(app.srcdir, name).parent
    for link in set(MARKDOWN.findall(text[0])):
        if not (page / link).resolve().is_relative_to(root):
            text[0] = text[0].replace(f"]({link}", f"](path:{link}")


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, or nothing if there are no rows."""
    lines = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    rule = "|".join("---" for _ in head.split("|"))
    return "".join(f"| {line} |\n" for line in (head, rule, *lines)) if lines else ""


def told(words: str | None, of: str) -> str:
    if not (words or "").strip():
        raise ValueError(f"{of} has no words for the reference. Write what it means where it is defined.")
    return str(words).strip()


# ---- settings


def settings() -> Iterator[str]:
    yield f"Settings\n========\n\n{MADE}"
    yield "Each is a variable of the environment, and a field of its class. An empty variable is not set."
    yield "A variable with the prefix ``UNDERTOW_`` that is no setting is refused.\n"
    for title, model in SETTINGS.items():
        yield f"{title}\n{'-' * len(title)}\n\n``{model.__name__}``: {inspect.getdoc(model)}\n"
        for names, words in meanings(model):
            variables = [f"{model.model_config['env_prefix']}{name}".upper() for name in names]
            yield ".. envvar:: " + "\n            ".join(variables) + "\n"
            yield from (f"   | ``{name}``: {bounded(model.model_fields[name])}" for name in names)
            yield f"\n   {told(words, variables[0])}\n"


def meanings(model: type[BaseSettings]) -> Iterator[tuple[list[str], str]]:
    """The fields with the comment above them, which is of all up to an empty line or the next comment."""
    fields: list[str] = []
    words: list[str] = []
    for line in [*inspect.getsource(model).partition("    @")[0].splitlines(), ""]:
        text = line.strip()
        if fields and (not text or text.startswith("#")):
            yield fields, " ".join(words)
            fields, words = [], []
        if text.startswith("#"):
            words.append(text.removeprefix("# "))
        elif line[4:5].isalpha() and (name := text.partition(":")[0]) in model.model_fields:
            fields.append(name)


def bounded(field: FieldInfo) -> str:
    """A field's type, its bounds and its default."""
    parts = [(BOUNDS[name], getattr(of, name, None)) for of in field.metadata for name in BOUNDS]
    bounds = "".join(f" {word} ``{value}``" for word, value in parts if value is not None)
    default = "of the machine" if field.default_factory else field.default
    shown = "none" if default in (None, "", ()) else f"``{default}``"
    return f"{typed(field.annotation)}{bounds}; default: {shown}"


def typed(kind: Any) -> str:
    """A type in words."""
    parts = [part for part in get_args(kind) if part not in (type(None), ...)]
    if parts:
        return ", ".join(f"``{part}``" if isinstance(part, str) else typed(part) for part in parts)
    return TYPES.get(kind, getattr(kind, "__name__", str(kind)))


# ---- the command line


def commands() -> Iterator[str]:
    yield f"# Commands\n\n{MADE}\nEach command says the same with `--help`.\n"
    yield from command("undertow", typer.main.get_command(cli.app))


def command(name: str, one: Any) -> Iterator[str]:
    context = one.context_class(one)
    yield f"## `{name}`\n\n{told(one.help, name)}\n"
    yield f"```\n{name} {' '.join(one.collect_usage_pieces(context))}\n```\n"
    shown = [(*param.get_help_record(context), param.help) for param in one.params if not param.hidden]
    rows = ((f"`{usage}`", told(words and more, f"{name} {usage}")) for usage, more, words in shown)
    yield table("argument or option | meaning", rows)
    for child, more in sorted(getattr(one, "commands", {}).items()):
        yield from command(f"{name} {child}", more)


# ---- HTTP


def http() -> Iterator[str]:
    """From the OpenAPI document, for which the application needs no service behind it."""
    service = SimpleNamespace(memories=SimpleNamespace(tenant_key=None))
    vars(service).update(dict.fromkeys(("load", "guard", "turns", "metrics")))
    document = make_app(service).openapi()  # type: ignore[arg-type]
    yield f"# HTTP\n\n{MADE}\n{document['info']['description']}"
    yield "A service has this document at `/openapi.json`, and a page to try it at `/docs`.\n\n## Errors\n"
    yield table("status | meaning", ((str(status), words) for status, words in STATUSES.items()))
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"## {method.upper()} {path}\n\n{told(route.get('description'), path)}\n"
            rows = ((f"`{of['name']}`", of["in"], *meaning(of)) for of in route.get("parameters", ()))
            yield table("parameter | in | type | meaning", rows)
            for media, body in route.get("requestBody", {}).get("content", {}).items():
                yield f"Request, `{media}`: {shape(body['schema'])}.\n"
            for status in (status for status in route["responses"] if status < "400"):
                sent = route["responses"][status].get("content", {}).items()
                yield f"- {status}" + "".join(f", `{kind}`: {shape(of['schema'])}" for kind, of in sent)
            yield f"\nErrors: {', '.join(one for one in route['responses'] if one >= '400') or 'none'}.\n"
    yield "## Shapes\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        fields, needed = schema.get("properties", {}), schema.get("required", ())
        parts = ((key, {"schema": of, "required": key in needed}) for key, of in fields.items())
        rows = ((f"`{key}`", *meaning(of)) for key, of in parts)
        yield f"(shape-{name.lower()})=\n### {name}\n\n{schema.get('description', '')}\n"
        yield table("field | type | meaning", rows) or f"{shape(schema)}\n"


def meaning(of: Mapping[str, Any]) -> tuple[str, str]:
    """The type of a field or a parameter, and what is said of it."""
    schema = of["schema"]
    more = "(required)" if of.get("required") else ""
    if (default := schema.get("default")) not in (None, "", {}):
        more = f"(default: `{default}`)"
    words = (one.get("description") for one in (of, schema, *schema.get("anyOf", ())))
    return shape(schema), f"{next(filter(None, words), '')} {more}"


def shape(schema: Mapping[str, Any]) -> str:
    """A schema in words, with links to the shapes that have names."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f"[{name}](#shape-{name.lower()})"
    if either := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(shape, either)))
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {shape(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


# ---- metrics, errors


def metrics() -> Iterator[str]:
    yield f"# Metrics\n\n{MADE}\nA service tells them at `/metrics`; none has a label for tenants."
    yield "A histogram has three series: `_bucket`, `_sum` and `_count`.\n"
    own = [of for of in vars(HTTPMetrics()).values() if isinstance(of, MetricWrapperBase)]
    process = ProcessCollector(registry=CollectorRegistry()).collect()
    for title, of in {"HTTP": own, "Shards": ShardCollector({}).collect(), "Process": process}.items():
        yield f"## {title}\n\n{table('name | type | labels | meaning', map(metric, of))}"


def metric(of: Any) -> tuple[str, ...]:
    """What is counted here keeps its parts under other names than what is told of shards."""
    name, kind, words = (getattr(of, f"_{part}", None) or getattr(of, part) for part in METRIC)
    labels = ", ".join(getattr(of, "_labelnames", ()))
    return f"`{name}{'_total' * (kind == 'counter')}`", kind, labels, told(words, name)


def errors() -> Iterator[str]:
    words = dict(re.findall(r"(\d+) ([^;]+)[;.]", EXIT_CODES))
    yield f"# Exit codes and problem types\n\n{MADE}\n## Exit codes\n"
    rows = ((f"{one:d}", told(words.get(f"{one:d}"), one.name), WHAT_TO_DO[one]) for one in Exit)
    yield table("code | meaning | what to do", rows)
    yield f"## Problem types\n\nErrors over HTTP are `{problems.MEDIA_TYPE}` (RFC 9457)."
    yield "On mem0's routes they are plain JSON."
    yield "An error without a type of its own, such as 405, has the type `about:blank`."
    yield "Where several texts are possible, each is given; … is what depends on the case.\n"
    rows = ((f"`{problems.URN}{kind[0]}`", kind[1], text) for kind, text in sorted(problem_types().items()))
    yield table("type | status | what it says", rows)


def problem_types() -> dict[tuple[str, str], str]:
    """The problems of engine errors, and those that the service raises itself, with their texts."""
    kinds = [*problems.KINDS.values(), problems.INTERNAL]
    found: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        found.setdefault((kind.slug, str(kind.status)), []).append(kind.detail or VARIES)
    for file in sorted(Path(problems.__file__).parents[1].rglob("*.py")):
        tree = ast.parse(file.read_text())
        for call in (of for of in ast.walk(tree) if isinstance(of, ast.Call)):
            made = ast.unparse(call.func)
            first = [ast.Constant(429)] * (made == "Refusal")
            status, slug, words, *_ = [*first, *call.args, *[ast.Constant(None)] * 3]
            if made in ("Problem", "Refusal") and texts(slug, tree) and getattr(status, "value", None):
                key = (texts(slug, tree)[0], str(status.value))
                found.setdefault(key, []).extend(texts(words, tree))
    return {kind: "<br>".join(dict.fromkeys(words)) or VARIES for kind, words in found.items() if kind[0]}


def texts(of: ast.expr, tree: ast.Module) -> list[str]:
    """The texts that an expression may be, with … for the parts that are known only when it runs."""
    match of:
        case ast.Constant(str(words)):
            return [words]
        case ast.JoinedStr(parts):
            words = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
            return [words] if words.strip("… :") else []
        case ast.IfExp(_, one, other):
            return [*texts(one, tree), *texts(other, tree)]
        case ast.Call(ast.Attribute(words, "format")):
            return [re.sub(r"\{\w+\}", "…", text) for text in texts(words, tree)]
        case ast.Name(name):
            given = [
                one
                for one in ast.walk(tree)
                if isinstance(one, ast.Assign)
                and ast.unparse(one.targets[0]) == name
                and one.lineno < of.lineno
            ]
            return texts(max(given, key=lambda one: one.lineno).value, tree) if given else []
    return []


# ---- file formats, MCP


def file_formats() -> Iterator[str]:
    yield f"# File formats\n\n{MADE}"
    for title, words, head, rows in formats():
        yield f"{title}\n\n{words}\n\n{table(head, rows)}"


def mcp() -> Iterator[str]:
    yield f"# MCP tools\n\n{MADE}\n[The service](../service.md#mcp) says how to reach them.\n"
    for tool in TOOLS.values():
        given = tool.described(bound=False).input_schema
        yield f"## `{tool.name}`\n\n{tool.title}. {tool.description}\n"
        needed = given.get("required", ())
        parts = ((key, {"schema": of, "required": key in needed}) for key, of in given["properties"].items())
        yield table("argument | type | meaning", ((f"`{key}`", *meaning(of)) for key, of in parts))


# ---- Python


def python() -> Iterator[str]:
    yield f"Python\n======\n\n{MADE}"
    for name in sorted(set(undertow.__all__) - {"__version__"}, key=str.lower):
        public = getattr(undertow, name)
        if public in SETTINGS.values():
            # its fields are on the page of settings; the signature would be pydantic's own
            yield f".. autoclass:: undertow.{name}(**fields)\n"
        elif inspect.isclass(public) and not issubclass(public, Exception):
            yield f".. autoclass:: undertow.{name}{MEMBERS}\n"
        else:
            kind = "autoclass" if inspect.isclass(public) else "autofunction"
            yield f".. {kind}:: undertow.{name}\n"
