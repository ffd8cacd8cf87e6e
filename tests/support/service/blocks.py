"""The fenced blocks of Markdown pages, and what can be checked of them without running them."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from undertow.engine.base.config import Settings
from undertow.engine.base.environment import OTHERS
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving.cli import app
from undertow.serving.http.service_settings import ServiceSettings

from ..cluster.forked import ROOT

SHELL = ("bash", "sh")
SHOWN = ("text", "json", "yaml", "toml", "{toctree}")
COMMAND = re.compile(
    r"^\s*(\$ |[A-Z_]+=\S|\.venv/|\./|"
    r"(undertow|make|pip|python3?|pytest|curl|docker|kubectl|export|bash|git|ray) )"
)
FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
NOT_RUN = re.compile(r" *<!-- not run: (.+) -->")
REASON = re.compile(
    r"needs (?:a card|a cluster|a hosted LLM|(minutes and gigabytes|another program) \(.+\)(?<!\(\)))$"
)
PROGRAM = typer.main.get_command(app)
DEFAULTS = {
    f"{model.model_config['env_prefix']}{name}".upper(): field.default
    for model in (Settings, ServiceSettings, ClusterSettings)
    for name, field in model.model_fields.items()
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its fence
    language: str
    text: str
    reason: str | None  # why it is not run

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        return self.language in (*SHELL, "python")

    @property
    def kind(self) -> str:
        """The reason without what stands in brackets."""
        return (self.reason or "").partition(" (")[0]


def pages() -> list[str]:
    """README, CONTRIBUTING, SECURITY and all below docs/, but for what is made at the build."""
    found = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]
    first = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
    return first + [page for page in found if not page.startswith("docs/reference/")]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        if opened := FENCE.match(line):
            inside: list[str] = []
            for _, content in lines:
                if content.strip() == opened[2]:
                    break
                inside.append(content.removeprefix(opened[1]))
            reason = NOT_RUN.match(before)
            language = opened[3].strip().partition(" ")[0]
            yield Block(page, number, language, "\n".join(inside) + "\n", reason and reason[1])
        before = line


def faults_of(block: Block) -> Iterator[str]:
    """What is wrong with it as it stands."""
    commands = [line for line in block.text.splitlines() if COMMAND.match(line)]
    if block.language not in ("", *SHELL, "python", *SHOWN):
        yield f"nothing is known of the language {block.language!r}"
    if commands and (block.language == "" or (block.language == "text" and COMMAND.match(block.text))):
        yield f"a command without a language: {commands[0]}"
    if block.reason is not None:
        if not REASON.match(block.reason):
            yield f"this is no reason: {block.reason}"
        if not block.is_code:
            yield "a reason above a block that is never run"
    if block.is_code:
        yield from unknown_settings(block.text)
    if block.language in SHELL and block.reason is not None:
        for words in commands_of(block.text):
            yield from (f"{fault}: {shlex.join(words)}" for fault in faults_of_command(words))


def unknown_settings(text: str) -> Iterator[str]:
    named = set(re.findall(r"\bUNDERTOW_[A-Z_]*[A-Z]\b(?!_)", text))
    yield from (f"{name} is no setting" for name in sorted(named - {*DEFAULTS, *OTHERS}))


def faults_of_words(page: str, text: str) -> Iterator[str]:
    """What a page names between its blocks, in backticks, and the program does not have."""
    words = re.sub(r"^ *(```+).*?^ *\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for part in re.findall(r"`([^`\n]+)`", words):
        faults = [*unknown_settings(part)]
        if part.startswith("undertow "):
            faults += wrong_options(part.split()[1:], whole=False)
        yield from (f"{page}: `{part}`: {fault}" for fault in faults)
    for name, told in re.findall(r"`(UNDERTOW_\w+)` \((\d+(?:,\d{3})*)(?: m?s)?[;,)]", words):
        if DEFAULTS[name] not in (None, float(told.replace(",", ""))):
            yield f"{page}: the default of {name} is {DEFAULTS[name]}, not {told}"


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command, without assignments before it."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r" [<>]+ ?\S+", "", line)  # where its output goes
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def faults_of_command(words: Sequence[str]) -> Iterator[str]:
    """What the program, Makefile, pyproject.toml or the folders do not have."""
    names = [Path(word).name for word in words]
    if "undertow" in names and words[0] != "pip":
        yield from wrong_options(words[names.index("undertow") + 1 :])
    elif "-m" in words and (module := words[words.index("-m") + 1]).startswith("undertow."):
        yield from wrong_arguments(module, words[words.index("-m") + 2 :])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"no target {word}" for word in words[1:] if word not in targets)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = ",".join(re.findall(r"undertow\[(.+?)\]", " ".join(words))).split(",")
        unknown = {*filter(None, extras)} - set(project["optional-dependencies"])
        yield from (f"no extra {one}" for one in unknown)
    for word in words:
        if re.match(r"(bench|tests|kuberay|examples)/[\w/]+(\.\w+)?$", word) and not (ROOT / word).exists():
            yield f"no such file {word}"


def wrong_options(words: Sequence[str], whole: bool = True) -> Iterator[str]:
    """What the program's own parser says of the arguments of `undertow`; `whole`: none may be missing."""
    command: Any = PROGRAM
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    context = command.context_class(command)
    try:
        given, more, _ = command.make_parser(context).parse_args(rest)
        if more or (whole and hasattr(command, "commands")):
            yield f"no command or argument {' '.join(more)}"
        for param in command.params if whole else ():
            param.process_value(context, given.get(param.name))
    except Exception as refused:  # noqa: BLE001 - typer has its own copy of click's errors
        # the reader's files are not here
        if "does not exist" not in str(refused) and (whole or "requires an argument" not in str(refused)):
            yield str(refused)


def wrong_arguments(module: str, words: Sequence[str]) -> Iterator[str]:
    """There is no such module to be run, or its code does not name an option."""
    found = find_spec(module)
    if found and found.submodule_search_locations:
        found = find_spec(f"{module}.__main__")
    source = Path(found.origin).read_text().replace("_", "-") if found and found.origin else ""
    if not source:
        yield f"no module {module}"
    yield from (f"no {word}" for word in words if word.startswith("--") and word[2:] not in source)
