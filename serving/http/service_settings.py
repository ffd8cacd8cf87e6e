"""The limits of the service, validated once.

The environment (prefix UNDERTOW_SERVICE_) is read here for the service, as engine/base/config.py does for the
engine.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, IPvAnyNetwork, model_validator
from pydantic_settings import SettingsConfigDict

from undertow.engine.base.environment import CheckedSettings

PREFIX = "UNDERTOW_SERVICE_"


class ServiceSettings(CheckedSettings):
    """Limits on requests, jobs and connections, and the timing of the shutdown."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    # the size of one request, and of an import
    max_body_bytes: int = Field(default=4 << 20, ge=1 << 10)
    max_import_bytes: int = Field(default=256 << 20, ge=1 << 10)
    # in one request: the items of an add, the hits of a search, the entries of a page of a list
    max_items: int = Field(default=256, ge=1, le=10_000)
    max_top_k: int = Field(default=1_000, ge=1, le=1_000)
    max_page: int = Field(default=1_000, ge=1, le=1_000)
    # how long a client may take to send headers, a body, the body of an import
    header_timeout_s: float = Field(default=10.0, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    import_timeout_s: float = Field(default=600.0, gt=0)
    # how long a client may read nothing of a response
    read_timeout_s: float = Field(default=60.0, gt=0)

    # how long a request may wait for its turn on the event loop, about
    max_wait_s: float = Field(default=0.1, gt=0)
    # requests under way: in all, for one tenant, with one key
    max_requests: int = Field(default=256, ge=2)
    max_tenant_requests: int = Field(default=32, ge=1)
    max_key_requests: int = Field(default=128, ge=1)
    # turns that are being stored, of one tenant and with one key: a quarter and half of queue_turns
    max_tenant_turns: int = Field(default=2_048, ge=1)
    max_key_turns: int = Field(default=4_096, ge=1)
    # requests that wait for an LLM or a reader; and imports, whose bodies are in memory: one of a tenant, and
    # half of them with one key
    max_long_requests: int = Field(default=128, ge=1)
    max_imports: int = Field(default=4, ge=1)
    # connections, and how long an idle one is kept
    max_connections: int = Field(default=4_096, ge=1)
    keep_alive_s: int = Field(default=30, ge=1)

    # jobs of one operation that run at once, each of another tenant; open jobs of one tenant
    jobs_at_once: int = Field(default=4, ge=1)
    max_tenant_jobs: int = Field(default=16, ge=1)
    # open jobs in total, and the bytes of their import bodies in the state folder
    max_jobs: int = Field(default=1_024, ge=1)
    max_job_bytes: int = Field(default=4 << 30, ge=1 << 10)
    # how long to keep jobs that ended, and responses to requests with an Idempotency-Key
    keep_s: float = Field(default=86_400.0, gt=0)

    # streams of events, which count among no other requests of these: in all, of one tenant and with one key,
    # and how long one may last
    max_streams: int = Field(default=64, ge=1)
    max_tenant_streams: int = Field(default=8, ge=1)
    max_key_streams: int = Field(default=4, ge=1)
    stream_s: float = Field(default=300.0, gt=0)
    # webhooks, in all and with one key, how long one may fail before it is disabled, and networks where they
    # may go besides the public internet, at any port and without TLS
    max_webhooks: int = Field(default=256, ge=1)
    max_key_webhooks: int = Field(default=16, ge=1)
    webhook_patience_s: float = Field(default=3 * 86_400.0, gt=0)
    webhook_networks: tuple[IPvAnyNetwork, ...] = ()

    # an OpenID Connect issuer, whose access tokens for this audience are taken beside keys; and the requests
    # a second and LLM tokens a day of each of its subjects
    oidc_issuer: str | None = None
    oidc_audience: str | None = None
    oidc_requests_per_s: float | None = Field(default=None, gt=0)
    oidc_tokens_per_day: int | None = Field(default=None, ge=0)

    # at shutdown: how long /health/ready reports it before connections are refused, even without requests;
    # and how long requests under way may take
    drain_notice_s: float = Field(default=1.0, ge=0)
    drain_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _issuer_has_an_audience(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("oidc_issuer and oidc_audience go together: tokens for others must be refused")
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if max(self.max_tenant_requests, self.max_key_requests) >= self.max_requests:
            raise ValueError(
                f"max_tenant_requests ({self.max_tenant_requests}) and max_key_requests "
                f"({self.max_key_requests}) must be smaller than max_requests ({self.max_requests}): one "
                "tenant or key must leave room for others"
            )
        if self.max_job_bytes < self.max_import_bytes:
            raise ValueError(
                f"max_job_bytes ({self.max_job_bytes}) must not be smaller than max_import_bytes "
                f"({self.max_import_bytes}): the largest import could never be a job"
            )
        return self
