"""Which environment variables Undertow reads. A misspelt one would be a setting without effect."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "UNDERTOW_"
# Settings of their own: of the service, of a cluster.
SECTIONS = ("UNDERTOW_SERVICE_", "UNDERTOW_CLUSTER_")
# No settings: keys of the client and of benchmarks, the URL of `consume redis`, a switch of the tests, the
# model of compose.yaml.
OTHERS = (
    *("UNDERTOW_API_KEY", "UNDERTOW_PEER_API_KEY", "UNDERTOW_REDIS_URL", "UNDERTOW_REQUIRE_GPU"),
    "UNDERTOW_VLLM_MODEL",
)

SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP)(_\w+)?)?$")


class CheckedSettings(BaseSettings):
    """Settings from the variables with the prefix of a subclass, each of which must be one of them."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _every_variable_is_a_setting(cls, given: Any) -> Any:
        refuse_unknown(cls.model_config["env_prefix"], cls.model_fields)
        return given


def refuse_unknown(prefix: str, settings: Collection[str]) -> None:
    """ValueError: a variable with this prefix is no setting. `settings`: their names without the prefix."""
    known = [name.upper() for name in settings]
    others = (*OTHERS, *SECTIONS) if prefix == PREFIX else ()
    for variable in sorted(map(str.upper, os.environ)):
        name = variable.removeprefix(prefix)
        if name == variable or name in known or variable.startswith(others) or _is_service_link(variable):
            continue
        near = ", ".join(f"{prefix}{setting}" for setting in get_close_matches(name, known, n=3))
        raise ValueError(f"{variable} is no setting; {f'did you mean {near}?' if near else 'unset it'}")


def _is_service_link(variable: str) -> bool:
    """Whether Kubernetes may have set it, in a pod beside a service whose name begins with `undertow`."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_LINK.search(variable) is not None
