"""The forward pass of Qwen3 over a packed batch, for embedding models made of it.

Norms before each step, rotated positions, several query heads to one key head, each token sees itself and
earlier ones, and a window's vector is that of its last token. Qwen3 report, arXiv 2505.09388.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from undertow.kernels.encoder.attention import attention
from undertow.kernels.encoder.decoder_steps import add_rms_norm, gated, norm_and_rotate
from undertow.kernels.encoder.layout import PackedTokens
from undertow.kernels.encoder.linear import Weights, linear
from undertow.kernels.encoder.pool import last_of_windows


@dataclass(frozen=True)
class DecoderLayer:
    """All float16, or all bfloat16; biases are zero."""

    norm: torch.Tensor
    qkv: Weights
    head_norms: tuple[torch.Tensor, torch.Tensor]
    """Of queries and keys, [dim] each."""
    mix: Weights
    second_norm: torch.Tensor
    gate_up: Weights
    down: Weights


@dataclass(frozen=True)
class Decoder:
    """Weights on one device, and what the configuration says of them."""

    words: torch.Tensor
    """[vocabulary, hidden]"""
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    turns: torch.Tensor
    """float32 [positions, dim], see `turns_of`."""
    heads: tuple[int, int]
    """Of queries and of keys."""
    eps: float

    def pooled(self, packed: PackedTokens) -> torch.Tensor:
        """One vector of each window, not normalised: float32 [sequences, hidden].

        Those of empty windows mean nothing.
        """
        x = self.words.index_select(0, packed.ids)
        change = torch.zeros_like(x)
        for layer in self.layers:
            x, normed = add_rms_norm(change, x, layer.norm, self.eps, packed.used)
            qkv = linear(normed, layer.qkv, packed.used)
            norm_and_rotate(qkv, packed, self.turns, layer.head_norms, self.eps, self.heads)
            seen = attention(qkv, packed, self.heads[0], key_heads=self.heads[1], causal=True)
            change = linear(seen, layer.mix, packed.used)
            x, normed = add_rms_norm(change, x, layer.second_norm, self.eps, packed.used)
            inner = gated(linear(normed, layer.gate_up, packed.used), packed.used)
            change = linear(inner, layer.down, packed.used)
        normed = add_rms_norm(change, x, self.norm, self.eps, packed.used)[1]
        return last_of_windows(normed, packed.starts)
