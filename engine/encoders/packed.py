"""A model over packed windows: which models fit, the weights of BERT, and the batches without padding.

`kernels/encoder` has the forward passes, of plain BERT and Qwen3; other models keep their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from undertow.engine.encoders.cpu import Batch, Shape
from undertow.engine.encoders.packed_decoder import decoder_of, why_not_decoder
from undertow.engine.encoders.tokenizer import Int32, Int64, Windows
from undertow.kernels.device import why_no_triton
from undertow.kernels.encoder.layout import QUERY_BLOCK, WIDEST_HEAD, Layout

if TYPE_CHECKING:
    import torch

    from undertow.kernels.encoder.bert import Bert, Layer
    from undertow.kernels.encoder.decoder import Decoder
    from undertow.kernels.encoder.layer_norm import Norm
    from undertow.kernels.encoder.linear import Weights

WIDEST = 1_024
"""Hidden sizes above it are left to the model's own forward pass: LayerNorm keeps a row in registers."""

SHORTEST = 32
"""A batch of n tokens has room for n / SHORTEST windows: shorter texts leave places unused, which the
kernels skip. More room would mean more programs of attention that find nothing to do."""

_DTYPES = {"BertModel": ("float16",), "Qwen3Model": ("float16", "bfloat16")}

_LINEARS = (
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("intermediate.dense", "output.dense"),
)
_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")


class PackedModel:
    """A model's forward pass over packed batches of `tokens` token places, each a single row."""

    def __init__(self, weights: Bert | Decoder, tokens: int) -> None:
        self._weights = weights
        self.layout = Layout(tokens, tokens // SHORTEST)
        self.shape: Shape = (tokens, 1)

    def batches(self, lengths: Int64) -> list[Batch]:
        """Windows in their order, each batch filled until the next window finds no room."""
        ends = np.cumsum(lengths)
        found: list[Batch] = []
        begin = 0
        while begin < len(lengths):
            before = ends[begin] - lengths[begin]
            fits = int(np.searchsorted(ends, before + self.layout.tokens, side="right"))
            end = min(fits, begin + self.layout.sequences)
            found.append(Batch(np.arange(begin, end), self.shape, full=end < len(lengths)))
            begin = end
        return found

    def pack(self, windows: Windows, batch: Batch, out: Int32) -> None:
        """Write a batch into `out`, int32 [layout.size], in full."""
        parts = self.layout.parts(out)
        begins = windows.offsets[batch.members]
        lengths = windows.offsets[batch.members + 1] - begins
        count, ends = len(lengths), np.cumsum(lengths)
        starts, used = ends - lengths, int(ends[-1])
        parts.positions[:used] = np.arange(used) - np.repeat(starts, lengths)
        parts.ids[:used] = windows.ids[np.arange(used) + np.repeat(begins - starts, lengths)]
        parts.ids[used:] = parts.positions[used:] = 0
        parts.starts[:count], parts.starts[count:] = starts, used
        blocks = -(-lengths // QUERY_BLOCK)
        total = int(blocks.sum())
        before = np.repeat(np.cumsum(blocks) - blocks, blocks)
        parts.block_start[:total] = np.repeat(starts, blocks)
        parts.block_first[:total] = (np.arange(total) - before) * QUERY_BLOCK
        parts.block_length[:total] = np.repeat(lengths, blocks)
        parts.block_start[total:] = parts.block_first[total:] = parts.block_length[total:] = 0

    def pooled(self, packed: torch.Tensor) -> torch.Tensor:
        """The model over one batch, int32 [layout.size]: float32 [layout.sequences, dim], not normalised."""
        return self._weights.pooled(self.layout.parts(packed))


def why_not_packed(model: Any, dtype: str, device: str) -> str | None:
    """Why the kernels cannot stand in for `model`, a SentenceTransformer, on `device`; None if they can."""
    if (reason := why_no_triton(device)) is not None:
        return reason
    head, *tail = model
    bert: Any = getattr(head, "auto_model", None)
    kind = type(bert).__name__
    if type(head).__name__ != "Transformer" or kind not in _DTYPES:
        return f"{kind} is no {' or '.join(_DTYPES)}"
    if dtype not in _DTYPES[kind]:
        return f"the kernels run a {kind} in {' or '.join(_DTYPES[kind])}, not in {dtype}"
    if kind == "Qwen3Model":
        return why_not_decoder(bert) or _other_pooling(tail, ("lasttoken",))
    if (reason := _other_form(bert.config)) is not None:
        return reason
    names = {name for name, _ in bert.named_parameters() if not name.startswith("pooler.")}
    if names != _names(bert.config.num_hidden_layers):
        return "the model's weights are not those of a plain BertModel"
    return _other_pooling(tail, ("mean", "cls"))


def _other_form(form: Any) -> str | None:
    """What a BertConfig asks for that the kernels do not know."""
    if form.hidden_act != "gelu" or getattr(form, "position_embedding_type", "absolute") != "absolute":
        return f"activation {form.hidden_act!r} or positions other than absolute ones"
    if getattr(form, "is_decoder", False) or form.hidden_size % form.num_attention_heads:
        return "a decoder, or heads of different sizes"
    if form.hidden_size > WIDEST or form.hidden_size // form.num_attention_heads > WIDEST_HEAD:
        return f"a hidden size above {WIDEST}, or heads above {WIDEST_HEAD}"
    return None


def _other_pooling(tail: list[Any], modes: tuple[str, ...]) -> str | None:
    """What follows the transformer, if it is not a pooling of these modes, normalised or not."""
    names = [type(module).__name__ for module in tail]
    if names not in (["Pooling"], ["Pooling", "Normalize"]):
        return f"the modules {', '.join(names)} follow the transformer"
    if tail[0].pooling_mode not in modes:
        return f"pooling is {tail[0].pooling_mode}"
    return None


def _names(layers: int) -> set[str]:
    """The parameters of a plain BertModel without its pooler."""
    modules = [f"encoder.layer.{i}.{name}" for i in range(layers) for name in (*_LINEARS, *_NORMS)]
    embeddings = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
    both = (f"{name}.{what}" for name in ("embeddings.LayerNorm", *modules) for what in ("weight", "bias"))
    return {*embeddings, *both}


def weights_of(model: Any, window: int) -> Bert | Decoder:
    """The weights of a model that `why_not_packed` finds fit: its own memory, but for BERT's Q, K and V.

    `window`: the most tokens of one.
    """
    from undertow.kernels.encoder.bert import Bert

    bert = model[0].auto_model
    if type(bert).__name__ == "Qwen3Model":
        return decoder_of(model, window)
    tables = bert.embeddings
    layers = bert.encoder.layer
    return Bert(
        words=tables.word_embeddings.weight.detach(),
        places=tables.position_embeddings.weight.detach(),
        kind=tables.token_type_embeddings.weight.detach()[0].clone(),
        norm=_norm(tables.LayerNorm),
        layers=tuple(_layer(layer) for layer in layers),
        heads=bert.config.num_attention_heads,
        takes_first=model[1].pooling_mode == "cls",
    )


def _layer(layer: Any) -> Layer:
    import torch

    from undertow.kernels.encoder.bert import Layer

    heads, mixed = layer.attention.self, layer.attention.output
    weights, biases = zip(*(_weights(part) for part in (heads.query, heads.key, heads.value)), strict=True)
    return Layer(
        qkv=(torch.cat(weights), torch.cat(biases)),
        mix=_weights(mixed.dense),
        mix_norm=_norm(mixed.LayerNorm),
        up=_weights(layer.intermediate.dense),
        down=_weights(layer.output.dense),
        down_norm=_norm(layer.output.LayerNorm),
    )


def _weights(linear: Any) -> Weights:
    return linear.weight.detach().contiguous(), linear.bias.detach()


def _norm(module: Any) -> Norm:
    from undertow.kernels.encoder.layer_norm import Norm

    return Norm(module.weight.detach(), module.bias.detach(), float(module.eps))
