"""Searching, and answers."""

from __future__ import annotations

from pydantic import Field

from undertow.engine.base.model import AnswerMode
from undertow.serving.http.schemas.base import Filters, Kind, Moment, RequestModel, ResponseModel, Words


class SearchRequest(RequestModel):
    query: Words
    top_k: int | None = Field(default=None, ge=1, le=1000, description="Left out: each tier's own count.")
    kinds: list[Kind] | None = Field(default=None, min_length=1, description="Left out: all three.")
    filters: Filters = Field(default_factory=dict)
    since: Moment | None = Field(default=None, description="Nothing earlier; undated ones are left out then.")
    until: Moment | None = Field(default=None, description="Nothing later; a date means its whole day.")
    threshold: float | None = Field(default=None, ge=-1, le=1, description="The lowest score to be shown.")


class FoundMemory(ResponseModel):
    """`score` is the cosine of query and memory, raised towards 1 where it has the query's words;
    `source_seqs` the turns that it rests on."""

    id: str
    memory: str
    score: float
    kind: Kind
    timestamp: str | None
    source_seqs: list[int]


class SearchResponse(ResponseModel):
    """Nearest first. `recall` of the index that found the turns, as measured; 1.0: the search was exact."""

    results: list[FoundMemory]
    recall: float


class AnswerRequest(RequestModel):
    question: Words
    as_of: Moment | None = Field(default=None, description="The moment at which the question is asked.")
    mode: AnswerMode | None = Field(
        default=None,
        description="hybrid: from all tiers at once. best_effort, under HiMem: from its notes, and from its "
        "episodes only where those do not suffice. Left out: as the service is set.",
    )
    stream: bool = Field(default=False, description="As text/event-stream; see the response.")


class Tokens(ResponseModel):
    calls: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class AnswerResponse(ResponseModel):
    """The answer, the memories that it was given, and what it cost."""

    answer: str
    memories: list[FoundMemory]
    usage: Tokens
