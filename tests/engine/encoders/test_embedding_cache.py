"""A tenant's identical texts are encoded once, on the host and on a device; nothing crosses tenants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from undertow.engine.encoders.base import DeviceEncoder, Encoded, Encoder, Float16
from undertow.engine.encoders.embedding_cache import EmbeddingCache
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.cluster.in_process import FailingEncoder


class _Counting(FailingEncoder):
    """An encoder that notes which texts it was asked for, and does not fail."""

    def __init__(self) -> None:
        super().__init__([], dim=32)


def test_cache_encodes_a_tenants_text_once_and_shares_nothing() -> None:
    counting = _Counting()
    inner: Encoder = counting
    cache = EmbeddingCache(inner, 10)
    got = cache.encode(["a", "a", "b", "a"], ["x y", "z", "x y", "x y"])
    assert counting.asked == [["x y", "z", "x y"]]
    assert np.array_equal(got, HashingEncoder(32).encode(["x y", "z", "x y", "x y"]))
    assert np.array_equal(cache.encode(["b", "a", "b"], ["x y", "x y", "z"]), got[[0, 0, 1]])
    assert counting.asked[1:] == [["z"]]  # known of tenant a, but not of b
    assert cache.encode([], []).shape == (0, 32)


def test_cache_forgets_the_text_used_longest_ago() -> None:
    counting = _Counting()
    cache = EmbeddingCache(counting, 2)
    for text in ("one", "two", "one", "three", "one", "two"):
        cache.encode(["t"], [text])
    assert counting.asked == [["one"], ["two"], ["three"], ["two"]]


def test_cache_of_no_capacity_dedupes_within_a_call_only() -> None:
    counting = _Counting()
    cache = EmbeddingCache(counting, 0)
    cache.encode(["t", "t"], ["one", "one"])
    cache.encode(["t"], ["one"])
    assert counting.asked == [["one"], ["one"]]
    with pytest.raises(ValueError, match="capacity"):
        EmbeddingCache(counting, -1)
    with pytest.raises(ValueError, match="one tenant a text"):
        cache.encode(["t"], ["one", "two"])


class _WithQueries(_Counting):
    """Queries have other vectors."""

    def encode_queries(self, texts: Sequence[str]) -> Float16:
        return -self.encode([f"query: {text}" for text in texts])


def test_a_query_and_a_document_are_kept_apart() -> None:
    counting = _WithQueries()
    cache = EmbeddingCache(counting, 10)
    for _ in range(2):
        document, query = cache.encode(["t"], ["x"])[0], cache.encode_queries("t", ["x"])[0]
        assert np.array_equal(document, HashingEncoder(32).encode(["x"])[0])
        assert np.array_equal(query, -HashingEncoder(32).encode(["query: x"])[0])
    assert counting.asked == [["x"], ["query: x"]]
    cache.forget("t")
    cache.encode_queries("t", ["x"])[0]
    assert counting.asked[2:] == [["query: x"]]
    plain = EmbeddingCache(alike := _Counting(), 10)
    assert np.array_equal(plain.encode_queries("t", ["x"])[0], plain.encode(["t"], ["x"])[0])
    assert alike.asked == [["x"]], "one vector serves both"


class _OnDevice(_Counting):
    """Leaves its vectors as a tensor too."""

    def embed(self, texts: Sequence[str]) -> Encoded:
        host = self.encode(texts)
        return Encoded(host, torch.from_numpy(host.copy()))


def test_device_rows_are_the_host_rows() -> None:
    """Fresh ones stay on the device, known ones are sent there, repeats are copied there."""
    encoder = _OnDevice()
    assert isinstance(encoder, DeviceEncoder)
    assert not isinstance(_Counting(), DeviceEncoder)
    cache = EmbeddingCache(encoder, 10)
    for tenants, texts in (
        ("aab", ["one", "two", "one"]),  # all fresh
        ("aaba", ["two", "three", "three", "three"]),  # known, fresh, fresh of another, repeated
        ("baa", ["four", "one", "two"]),
    ):
        got = cache.embed(list(tenants), texts)
        assert got.device is not None
        assert np.array_equal(got.device.numpy(), got.host)
        assert np.array_equal(got.host, HashingEncoder(32).encode(texts))
    assert encoder.asked == [["one", "two", "one"], ["three", "three"], ["four"]]
    known = cache.embed(["a", "b"], ["one", "four"])
    assert known.device is None  # nothing was computed there
    assert np.array_equal(known.host, HashingEncoder(32).encode(["one", "four"]))


def test_the_copy_to_hand_on_is_the_one_that_is_there() -> None:
    host = np.zeros((2, 32), np.float16)
    there = torch.empty((2, 32), dtype=torch.float16, device="meta")
    assert Encoded(host, there).on("meta") is there
    assert Encoded(host, there).on("cuda") is host
    assert Encoded(host, torch.from_numpy(host)).on("cpu") is host  # the host's arena takes NumPy
    assert Encoded(host).on("cuda") is host
