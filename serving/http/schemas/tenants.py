"""A tenant as a whole, and its jobs."""

from __future__ import annotations

from typing import Any, Literal

from undertow.serving.http.schemas.base import RequestModel, ResponseModel, Words


class Flushed(ResponseModel):
    """`decided` false: something is blocked, or the LLM server is lost; what is stored stays stored."""

    decided: bool


class Imported(ResponseModel):
    """What was stored: turns that were not deleted, and every version of episodes and facts."""

    turns: int
    episodes: int
    facts: int
    decisions: int


class PolicyRequest(RequestModel):
    """`drop_edits`: go on though memories were reworded or deleted by hand; their history stays."""

    policy: Words
    drop_edits: bool = False


class PolicyChangeView(ResponseModel):
    """A change under way: of `records` in the tenant's log, so many are `decided` anew."""

    policy: str
    generation: int
    decided: int
    records: int


class PolicyView(ResponseModel):
    """What has made the memories that are searched, and as which generation of them."""

    policy: str
    generation: int
    change: PolicyChangeView | None


class CertificateView(ResponseModel):
    """What an erasure removed. It names the tenant by its keyed hash alone."""

    tenant_key: str
    erased_at: str
    purged_at: str
    rows_removed: int
    turns_removed: int
    episodes_removed: int
    facts_removed: int
    out_of_reach: list[str]


class Accepted(ResponseModel):
    """A job that was accepted: it is done whatever becomes of this process."""

    id: str
    status: Literal["queued"]


class JobView(ResponseModel):
    """`result`: of a job that is done, what the operation answers; `error`: of one that failed, a problem."""

    id: str
    operation: Literal["flush", "import", "erase"]
    status: Literal["queued", "running", "done", "failed"]
    created_at: str
    finished_at: str | None


class JobList(ResponseModel):
    """Newest first."""

    results: list[JobView]


class Records(ResponseModel):
    """Records in their order; `next_after_seq` goes on where they end, null at the end."""

    results: list[dict[str, Any]]
    next_after_seq: int | None
