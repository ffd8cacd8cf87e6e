"""Makes the encoder that the settings name. It stands above the implementations, so that none imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undertow.engine.encoders.base import Encoder, Prompts
from undertow.kernels.device import resolve

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings


def make_encoder(settings: Settings) -> Encoder:
    """The encoder that `settings.encoder` names: a model's name or folder, `openai:MODEL` or `hash:DIM`.

    A model runs on `settings.device`; an endpoint is not asked yet. Raises ValueError for a malformed name,
    an endpoint without URL or a device that is not there, EncoderError for a model that cannot be loaded.
    """
    kind, _, size = settings.encoder.partition(":")
    if kind == "hash":
        if not (size.isascii() and size.isdigit()):
            raise ValueError(f"encoder {settings.encoder!r}: write the size after the colon, as in hash:384")
        # Imported here: it needs numba, and callers that only name an encoder do without.
        from undertow.engine.encoders.hashing import HashingEncoder

        return HashingEncoder(int(size))
    if kind == "openai":
        from undertow.engine.encoders.endpoint import EndpointEncoder

        return EndpointEncoder(settings)
    prompts = Prompts(settings.query_prompt, settings.document_prompt)
    if resolve(settings.device) == "cuda":
        from undertow.engine.encoders.cuda import CudaSentenceEncoder

        return CudaSentenceEncoder(settings.encoder, prompts=prompts)
    from undertow.engine.encoders.cpu import SentenceEncoder

    return SentenceEncoder(settings.encoder, prompts=prompts)
