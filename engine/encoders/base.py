"""Text to vectors: a text gets the same bits alone and in any company.

The protocol of encoders, and what their vectors carry. `factory.py` makes the one that the settings name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, get_type_hints, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Float16 = NDArray[np.float16]

TEXT_FORMAT = 1  # increase it when `model.spoken`, the windows or their averaging change


@dataclass(frozen=True)
class Fingerprint:
    """Identifies an encoder. `digest` covers weights, tokenizer, pooling, window and text format."""

    model: str
    digest: str
    dim: int
    dtype: str
    device: str

    @classmethod
    def stored(cls, fields: Mapping[str, Any]) -> Self:
        """The fingerprint in a store's description. StoreError if there is none."""
        types = get_type_hints(cls)
        if fields.keys() != types.keys() or any(type(fields[name]) is not t for name, t in types.items()):
            # Imported here: a machine that only measures encoders may lack the packages of stores.
            from undertow.engine.storage.store_info import StoreError

            raise StoreError(
                f"the encoder in store.json needs the fields {', '.join(types)}. "
                "Restore that file from a backup."
            )
        return cls(**fields)

    def with_timestamps(self) -> Fingerprint:
        """The same encoder over texts prefixed with their timestamp."""
        return replace(self, digest=hashlib.blake2b(f"{self.digest}+timestamp".encode()).hexdigest())

    def mismatch(self, other: Fingerprint) -> str | None:
        """Why vectors of `other`, the current encoder, must not be mixed with those of self, the store's."""
        if (self.digest, self.dim) == (other.digest, other.dim):
            return None
        return (
            f"the store's vectors come from the encoder {self._identity()}, but the encoder at hand is "
            f"{other._identity()}; their vectors cannot be compared. Use the store's encoder, "
            "or run `undertow reindex` to embed the store again with the new one"
        )

    def drift(self, other: Fingerprint) -> str | None:
        """A warning if `other` may differ from self, the store's, in the last bits only; else None."""
        if (self.dtype, self.device) == (other.dtype, other.device):
            return None
        return (
            f"the store's vectors were computed in {self.dtype} on {self.device}, new ones are computed in "
            f"{other.dtype} on {other.device}: the same text may differ in its last bits, so a decision very "
            "near a threshold may fall otherwise than it would have there"
        )

    def _identity(self) -> str:
        return f"{self.model} (digest {self.digest[:12]}, {self.dim} dimensions)"


class Encoder(Protocol):
    """The interface of an encoder. The bits of row i depend on text i alone.

    Two threads may call it at a time: a bulk load embeds its next turns while others are searched.
    """

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised, row i of text i; [0, dim] for no texts."""
        ...


@runtime_checkable
class QueryEncoder(Encoder, Protocol):
    """An encoder that embeds queries otherwise than documents: its model has a prompt for each."""

    def encode_queries(self, texts: Sequence[str]) -> Float16:
        """As `encode`, for texts to search with; these vectors are not stored."""
        ...


class Prompts(NamedTuple):
    """What stands before each query, and before each text that is stored. None: as the model says."""

    query: str | None = None
    document: str | None = None


OWN_PROMPTS = Prompts()


def with_prompt(prompt: str | None, texts: Sequence[str]) -> Sequence[str]:
    return [prompt + text for text in texts] if prompt else texts


@dataclass(frozen=True, slots=True)
class Encoded:
    """L2-normalised vectors of texts, on the host, and on a device if they were computed there."""

    host: Float16
    """float16 [n, dim]."""
    device: torch.Tensor | None = None
    """float16 [n, dim], the same bits."""

    def on(self, device: str) -> Float16 | torch.Tensor:
        """The copy for work on "cpu" or "cuda": that on the device if it exists, else that on the host."""
        if device == "cpu" or self.device is None or self.device.device.type != device:
            return self.host
        return self.device


@runtime_checkable
class DeviceEncoder(Encoder, Protocol):
    """An encoder that also leaves its vectors on a device."""

    def embed(self, texts: Sequence[str]) -> Encoded:
        """As `encode`, with the vectors on the device too."""
        ...


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows scaled to length 1; a row of zeros stays."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    scaled: NDArray[np.float64] = vectors / np.where(lengths > 0, lengths, 1.0)
    return scaled


def speakable(text: str) -> str:
    """The text without lone surrogates, which JSON allows and tokenizers reject."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
