"""Each text's vector computed once: many texts at a time, and on request kept in a file for the next run."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Encoder, Fingerprint, Float16, QueryEncoder

Encode = Callable[[Sequence[str]], Float16]


class KeptVectors:
    """An encoder that asks another one for a text only once. A text's bits do not depend on its company."""

    def __init__(self, encoder: Encoder, file: Path | None = None) -> None:
        """UndertowError: the file is another encoder's, or none of ours."""
        self._encoder = encoder
        self._file = file
        self._vectors: dict[bytes, Float16] = {}
        self._is_changed = False
        if file is not None and file.exists():
            self._read(file)

    @property
    def dim(self) -> int:
        return self._encoder.dim

    @property
    def fingerprint(self) -> Fingerprint:
        return self._encoder.fingerprint

    def encode(self, texts: Sequence[str]) -> Float16:
        return self._kept(texts, self._encoder.encode)

    def encode_queries(self, texts: Sequence[str]) -> Float16:
        if not isinstance(self._encoder, QueryEncoder):
            return self.encode(texts)
        return self._kept(texts, self._encoder.encode_queries, b"query")

    def _kept(self, texts: Sequence[str], encode: Encode, kind: bytes = b"") -> Float16:
        keys = [hashlib.blake2b(text.encode(), digest_size=16, person=kind).digest() for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._vectors}
        if missing:
            fresh = encode(list(missing.values()))
            self._vectors.update(zip(missing, fresh, strict=True))
            self._is_changed = True
        return np.stack([self._vectors[key] for key in keys]) if keys else np.empty((0, self.dim), np.float16)

    def save(self) -> None:
        """Write the file, if there is one to write, anew if there is something new."""
        if self._file is None or not self._is_changed:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(self._file.name + ".draft")
        with draft.open("wb") as file:
            np.savez(
                file,
                digest=np.array(self.fingerprint.digest),
                keys=np.frombuffer(b"".join(self._vectors), np.uint8).reshape(-1, 16),
                vectors=np.stack(list(self._vectors.values())),
            )
        draft.replace(self._file)

    def _read(self, file: Path) -> None:
        try:
            with np.load(file, allow_pickle=False) as kept:
                digest, keys, vectors = str(kept["digest"]), kept["keys"], kept["vectors"]
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UndertowError(f"{file} is no file of kept vectors ({error}). Name another.") from None
        if digest != self.fingerprint.digest:
            raise UndertowError(f"the vectors in {file} are another encoder's. Name another file.")
        self._vectors = {key.tobytes(): vector for key, vector in zip(keys, vectors, strict=True)}
