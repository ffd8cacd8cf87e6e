"""Stands in for a store's encoder in commands that embed nothing, so that no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Fingerprint
from undertow.engine.storage.store_info import StoreInfo


def stored_fingerprint(info: StoreInfo) -> Fingerprint:
    """The encoder that a store's description names. StoreError: it names none."""
    return Fingerprint.stored(info.encoder)


class UnloadedEncoder:
    """Has the fingerprint of the store's own encoder, and refuses to encode."""

    def __init__(self, info: StoreInfo) -> None:
        self._fingerprint = stored_fingerprint(info)

    @property
    def dim(self) -> int:
        return self._fingerprint.dim

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    def encode(self, texts: Sequence[str]) -> NDArray[np.float16]:
        """UndertowError: this command was to embed nothing."""
        raise UndertowError(f"the encoder {self._fingerprint.model} was not loaded for this command")
