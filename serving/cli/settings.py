"""Builds settings from flags and environment, and checks them before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undertow.serving.cli.errors import wrong_usage

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings


def settings_of(*, llm: str | None = None, model: str | None = None, **flags: Any) -> Settings:
    """Settings from the environment; the given flags take precedence. WrongUsage: one is invalid."""
    from undertow.engine.base.config import Settings

    given = {name: value for name, value in flags.items() if value is not None}
    if llm is not None:
        given["llm_url"] = None if llm.lower() == "off" else llm
    if model is not None:
        given["llm_model"] = model
    with wrong_usage():
        return Settings(**given)


def check_settings(settings: Settings) -> None:
    """WrongUsage: the encoder's or a server's name is malformed. Loads and connects nothing."""
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.llm.client import OpenAILLM

    with wrong_usage():
        if settings.encoder.startswith("hash:"):
            make_encoder(settings)
        if settings.llm_url is not None:
            OpenAILLM(settings).close()
