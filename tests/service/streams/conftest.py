"""A Redis server and a mock of a Kafka cluster for the tests of streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.factory import make_encoder

from ...support.service.streams import MockKafka, RedisServer, Shared


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    redis = RedisServer(tmp_path / "redis")
    try:
        yield redis
    finally:
        redis.stop()


@pytest.fixture(scope="module")
def brokers() -> Iterator[MockKafka]:
    with closing(MockKafka()) as kafka:
        yield kafka


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    settings = Settings(encoder="hash:384", llm_url=None)
    with Engine(tmp_path / "s", settings, make_encoder(settings)) as engine:
        yield Shared(engine)
