"""A Qwen3 embedding model over packed windows: which models fit, and their weights (see packed.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undertow.kernels.encoder.layout import WIDEST_HEAD

if TYPE_CHECKING:
    import torch

    from undertow.kernels.encoder.decoder import Decoder, DecoderLayer

WIDEST = 1_024
"""Wider models keep their own forward pass: `linear` reads weights by tile, and theirs exceed the cache."""

_PARTS = (
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def why_not_decoder(decoder: Any) -> str | None:
    """Why the kernels cannot stand in for a Qwen3Model; None if they can."""
    form = decoder.config
    rope = form.rope_parameters["rope_type"]
    if form.hidden_act != "silu" or rope != "default":
        return f"activation {form.hidden_act!r}, or rotation {rope!r}"
    if set(form.layer_types) != {"full_attention"} or not getattr(form, "is_causal", True):
        return "a sliding window of attention, or tokens that see later ones"
    if form.hidden_size > WIDEST or form.head_dim > WIDEST_HEAD or form.head_dim % 2:
        return f"a hidden size above {WIDEST}, or heads above {WIDEST_HEAD} or of an odd size"
    layers = range(form.num_hidden_layers)
    names = {f"layers.{i}.{part}.weight" for i in layers for part in _PARTS}
    if {name for name, _ in decoder.named_parameters()} != {*names, "embed_tokens.weight", "norm.weight"}:
        return "the model's weights are not those of a plain Qwen3Model"
    return None


def decoder_of(model: Any, window: int) -> Decoder:
    """The weights of a model that fits, in its own memory. `window`: the most tokens of one."""
    from undertow.kernels.encoder.decoder import Decoder
    from undertow.kernels.encoder.decoder_steps import turns_of

    decoder = model[0].auto_model
    form, words = decoder.config, decoder.embed_tokens.weight.detach()
    return Decoder(
        words=words,
        layers=tuple(_layer(layer) for layer in decoder.layers),
        norm=decoder.norm.weight.detach(),
        turns=turns_of(window, form.head_dim, form.rope_parameters["rope_theta"], words.device),
        heads=(form.num_attention_heads, form.num_key_value_heads),
        eps=float(form.rms_norm_eps),
    )


def _layer(layer: Any) -> DecoderLayer:
    from undertow.kernels.encoder.decoder import DecoderLayer

    attention, inner = layer.self_attn, layer.mlp
    return DecoderLayer(
        norm=layer.input_layernorm.weight.detach(),
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach()),
        mix=_joined(attention.o_proj),
        second_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_joined(inner.gate_proj, inner.up_proj),
        down=_joined(inner.down_proj),
    )


def _joined(*linears: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights one after the other, which the model then uses too, and biases of zero."""
    import torch

    weight = torch.cat([linear.weight.detach() for linear in linears])
    parts = torch.split(weight, [len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    return weight, weight.new_zeros(len(weight))
