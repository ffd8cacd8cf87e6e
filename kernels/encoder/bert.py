"""The forward pass of BERT over a packed batch, made of the kernels of this folder.

Of the plain architecture: absolute positions, GELU with erf, LayerNorm after each residual sum. No launch
depends on what a batch holds, so all of them fit into one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from undertow.kernels.encoder.attention import attention
from undertow.kernels.encoder.layer_norm import Norm, embed
from undertow.kernels.encoder.layout import PackedTokens
from undertow.kernels.encoder.linear import Weights, linear
from undertow.kernels.encoder.linear_norm import linear_add_norm
from undertow.kernels.encoder.pool import first_of_windows, mean_of_windows


@dataclass(frozen=True)
class Layer:
    qkv: Weights
    """Queries, keys and values of all heads, one after the other: [3 * hidden, hidden]."""
    mix: Weights
    mix_norm: Norm
    up: Weights
    down: Weights
    down_norm: Norm


@dataclass(frozen=True)
class Bert:
    """Weights, all float16 on one device, and what the configuration says of them."""

    words: torch.Tensor
    """[vocabulary, hidden]"""
    places: torch.Tensor
    """[positions, hidden]"""
    kind: torch.Tensor
    """[hidden]: the embedding of token type 0, which every token has."""
    norm: Norm
    layers: tuple[Layer, ...]
    heads: int
    takes_first: bool
    """Whether a window's vector is that of its first token; else the mean over its tokens."""

    def pooled(self, packed: PackedTokens) -> torch.Tensor:
        """One vector of each window, not normalised: float32 [sequences, hidden].

        Those of empty windows mean nothing.
        """
        x = embed(packed, self.words, self.places, self.kind, self.norm)
        for layer in self.layers:
            x = self._through(layer, x, packed)
        pool = first_of_windows if self.takes_first else mean_of_windows
        return pool(x, packed.starts)

    def _through(self, layer: Layer, x: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        used = packed.used
        seen = attention(linear(x, layer.qkv, used), packed, self.heads)
        x = linear_add_norm(seen, layer.mix, x, layer.mix_norm, used)
        inner = linear(x, layer.up, used, gelu=True)
        return linear_add_norm(inner, layer.down, x, layer.down_norm, used)
