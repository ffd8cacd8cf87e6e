"""The bounds of the service, checked once.

The environment (prefix UNDERTOW_SERVICE_) is read here for the service, as engine/base/config.py does for the
engine.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "UNDERTOW_SERVICE_"


class ServiceSettings(BaseSettings):
    """What a request may bring and take, how many there may be at once, and how the service ends."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    # what one request brings
    max_body_bytes: int = Field(default=4 << 20, ge=1 << 10)
    max_import_bytes: int = Field(default=256 << 20, ge=1 << 10)
    max_items: int = Field(default=256, ge=1, le=10_000)
    max_top_k: int = Field(default=1_000, ge=1, le=1_000)
    max_page: int = Field(default=1_000, ge=1, le=1_000)
    # how long it may take to bring it: its headers, its body, the body of an import
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    import_timeout_s: float = Field(default=600.0, gt=0)
    # how long a sender may read nothing of an answer that waits for it
    read_timeout_s: float = Field(default=60.0, gt=0)

    # requests under way: in all, for one tenant, with one key; and connections
    max_requests: int = Field(default=256, ge=2)
    max_tenant_requests: int = Field(default=32, ge=1)
    max_key_requests: int = Field(default=128, ge=1)
    # of those, the ones that wait for an LLM or for whoever reads; and imports, whose bodies are in memory
    max_long_requests: int = Field(default=128, ge=1)
    max_imports: int = Field(default=4, ge=1)
    max_connections: int = Field(default=4_096, ge=1)
    keep_alive_s: int = Field(default=30, ge=1)

    # jobs of an operation that run at once, each of another tenant; and that may be open for one tenant
    jobs_at_once: int = Field(default=4, ge=1)
    max_tenant_jobs: int = Field(default=16, ge=1)
    # that may be open in all, and the bytes of those that are imports, which lie in the state folder
    max_jobs: int = Field(default=1_024, ge=1)
    max_job_bytes: int = Field(default=4 << 30, ge=1 << 10)
    # how long jobs that ended, and answers to requests with an Idempotency-Key, are kept
    keep_s: float = Field(default=86_400.0, gt=0)

    # at the end: how long /health/ready says so before connections are refused, if nobody is served any
    # more, and how long requests under way have
    drain_notice_s: float = Field(default=1.0, ge=0)
    drain_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _every_variable_is_a_setting(cls, given: Any) -> Any:
        """One that is misspelt would be a bound that nobody has."""
        known = {f"{PREFIX}{name.upper()}" for name in cls.model_fields}
        for name in sorted(os.environ):
            if name.upper().startswith(PREFIX) and name.upper() not in known:
                near = get_close_matches(name.upper(), known, n=3) or sorted(known)
                raise ValueError(f"{name} is no setting of the service; there is {', '.join(near)}")
        return given

    @model_validator(mode="after")
    def _one_tenant_leaves_room(self) -> Self:
        if max(self.max_tenant_requests, self.max_key_requests) >= self.max_requests:
            raise ValueError(
                f"max_tenant_requests ({self.max_tenant_requests}) and max_key_requests "
                f"({self.max_key_requests}) must be smaller than max_requests ({self.max_requests}): one "
                "tenant or key must leave room for others"
            )
        return self

    @model_validator(mode="after")
    def _every_import_can_be_a_job(self) -> Self:
        if self.max_job_bytes < self.max_import_bytes:
            raise ValueError(
                f"max_job_bytes ({self.max_job_bytes}) must not be smaller than max_import_bytes "
                f"({self.max_import_bytes}): the largest import could never be a job"
            )
        return self
