"""Stands in for a store's encoder in commands that embed nothing, so that no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

import numpy as np
from numpy.typing import NDArray

from undertow.engine.encoder import Fingerprint
from undertow.engine.model import UndertowError
from undertow.engine.store import StoreError, StoreInfo


def stored_fingerprint(info: StoreInfo) -> Fingerprint:
    """The encoder that a store's description names. StoreError: it names none."""
    types = get_type_hints(Fingerprint)
    named = info.encoder
    if named.keys() != types.keys() or not all(isinstance(named[n], t) for n, t in types.items()):
        raise StoreError(
            f"the encoder in store.json needs the fields {', '.join(types)}. Restore that file from a backup."
        )
    return Fingerprint(**named)


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
