"""The exit codes, and where every error that a user can meet becomes one clear line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from undertow.engine.base.extras import cure
from undertow.engine.base.model import InputError, NoLLM, UndertowError
from undertow.serving.cli.output import say

EXIT_CODES = (
    "Exit codes: 0 done; 1 the store or the engine failed; 2 the command line or a setting is wrong; "
    "3 some input was refused (the good lines were ingested); 4 the LLM server cannot be used and work "
    "is pending; 130 interrupted."
)


class Exit(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    INPUT = 3
    LLM = 4
    INTERRUPTED = 130


class WrongUsage(UndertowError):
    """The command line or a setting is wrong; the text says which and how to put it right."""


@contextmanager
def wrong_usage(option: str = "") -> Iterator[None]:
    """Around what does nothing but read what the user gave: a ValueError inside is about that."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(f"{option} {in_words(error)}".strip()) from error


class Guarded(TyperGroup):
    """Runs a command; an error becomes a line on standard error and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # the reader of our output has gone; keep Python from writing to it again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(Exit.FAILED) from None
        except KeyboardInterrupt:
            say("Interrupted.")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except (UndertowError, OSError, ImportError) as error:
            say(f"undertow: {in_words(error)}")
            raise typer.Exit(exit_code(error)) from None
        except ValueError as error:
            say(
                f"undertow: an internal error: {error}. "
                "Please report it, with what `undertow --debug COMMAND ...` shows."
            )
            raise typer.Exit(Exit.FAILED) from None


def exit_code(error: Exception) -> Exit:
    llm = sys.modules.get("undertow.engine.llm.replies")  # not loaded: the error is none of its
    if llm is not None and isinstance(error, llm.ServerRefused):
        return Exit.LLM
    if isinstance(error, InputError):
        return Exit.INPUT
    if isinstance(error, WrongUsage | NoLLM):
        return Exit.USAGE
    return Exit.FAILED


def in_words(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(
            f"setting {'.'.join(map(str, p['loc'])) or 'combination'}: {p['msg']}, not {p['input']!r:.60}"
            if p["loc"]
            else p["msg"].removeprefix("Value error, ")
            for p in error.errors(include_url=False)
        )
    if isinstance(error, ModuleNotFoundError):
        return cure(error)
    return str(error)
