"""The fields of an OpenAI-compatible server's responses that we read. Others are ignored."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field


def _storable(content: object) -> object:
    """Text without lone surrogates, which JSON can carry but UTF-8, and so the journal, cannot."""
    return content.encode(errors="replace").decode() if isinstance(content, str) else content


class _Message(BaseModel):
    content: Annotated[str | None, BeforeValidator(_storable)] = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _CachedTokens(BaseModel):
    cached_tokens: int | None = None


class _TokenCounts(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class ChatCompletion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    model: str | None = None
    usage: _TokenCounts | None = None


class _Delta(BaseModel):
    content: Annotated[str | None, BeforeValidator(_storable)] = None


class _Part(BaseModel):
    delta: _Delta
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """One event of a streamed reply; the last has the usage, and no choices."""

    choices: list[_Part] = []
    model: str | None = None
    usage: _TokenCounts | None = None


class _Model(BaseModel):
    id: str


class ModelList(BaseModel):
    data: list[_Model] = Field(min_length=1)
