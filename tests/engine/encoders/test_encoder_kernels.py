"""The kernels of the packed encoder, against plain torch in float32: on the CPU by Triton's interpreter.

The interpreter is chosen when Triton is first imported, so the tests run in a process of their own there
(`test_interpreted`). On a card they run in this one. Either way they are the functions named `check_*`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention, silu

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

ROOT = Path(__file__).parents[3]
LENGTHS = (1, 70, 64, 5)
"""One token, more than a query block and exactly one, and a window that shares a block's size with none."""


class Kit(NamedTuple):
    """The modules of `kernels/encoder`, imported after the interpreter is chosen, and the device."""

    attention: Any
    decoder_steps: Any
    layer_norm: Any
    layout: Any
    linear: Any
    linear_norm: Any
    pool: Any
    device: str


def kit(device: str) -> Kit:
    modules = [import_module(f"undertow.kernels.encoder.{name}") for name in Kit._fields[:-1]]
    return Kit._make([*modules, device])


def half(*shape: int, kit: Kit, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().to(kit.device)


def tokens_of(lengths: Sequence[int], kit: Kit, tokens: int = 256, sequences: int = 8) -> Any:
    """A packed batch of windows of these lengths; ids count up."""
    layout = kit.layout.Layout(tokens, sequences)
    parts = layout.parts(torch.zeros(layout.size, dtype=torch.int32))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts.starts[:] = torch.tensor(starts + [sum(lengths)] * (sequences + 1 - len(starts)))
    parts.ids[: sum(lengths)] = torch.arange(sum(lengths))
    blocks = []
    for window, length in enumerate(lengths):
        parts.positions[starts[window] : starts[window] + length] = torch.arange(length)
        blocks += [(window, first) for first in range(0, length, kit.layout.QUERY_BLOCK)]
    for i, (window, first) in enumerate(blocks):
        parts.block_start[i], parts.block_first[i] = starts[window], first
        parts.block_length[i] = lengths[window]
    return kit.layout.PackedTokens(*(part.to(kit.device) for part in parts))


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).abs().max())


def check_linear(kit: Kit) -> None:
    """Sizes that fill tiles and sizes that do not; GELU; rows of other tiles than the used ones stay."""
    for depth, columns in ((64, 128), (72, 40), (96, 256)):
        x, weight = half(256, depth, kit=kit), half(columns, depth, kit=kit, seed=1) / depth**0.5
        bias = half(columns, kit=kit, seed=2)
        all_rows = torch.tensor([256], dtype=torch.int32, device=kit.device)
        wanted = x.float() @ weight.float().T + bias.float()
        assert apart(kit.linear.linear(x, (weight, bias), all_rows), wanted) < 4e-3
        assert apart(kit.linear.linear(x, (weight, bias), all_rows, gelu=True), gelu(wanted)) < 4e-3
        some_rows = torch.tensor([3], dtype=torch.int32, device=kit.device)
        some = kit.linear.linear(x, (weight, bias), some_rows)[:3]
        # a row's bits: on its own, and at another place among other rows
        again = kit.linear.linear(torch.cat([x[100:], x[:100]]), (weight, bias), all_rows)[156:159]
        assert torch.equal(some, again)


def check_attention(kit: Kit) -> None:
    for heads, dim in ((2, 32), (1, 64), (2, 20)):
        packed = tokens_of(LENGTHS, kit)
        qkv = half(256, 3 * heads * dim, kit=kit)
        qkv[sum(LENGTHS) :] = float("nan")
        got = kit.attention.attention(qkv, packed, heads)
        begin = 0
        for length in LENGTHS:
            own = qkv[begin : begin + length].float().reshape(length, 3, heads, dim)
            q, k, v = own.permute(1, 2, 0, 3)
            wanted = scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(length, -1)
            assert apart(got[begin : begin + length], wanted) < 2e-3
            begin += length


def check_causal_attention(kit: Kit) -> None:
    """Each token sees itself and earlier ones, and several heads of queries share one of keys."""
    for heads, key_heads, dim in ((4, 2, 32), (2, 2, 24), (3, 1, 128)):
        qkv = half(256, (heads + 2 * key_heads) * dim, kit=kit)
        qkv[sum(LENGTHS) :] = float("nan")
        packed = tokens_of(LENGTHS, kit)
        got = kit.attention.attention(qkv, packed, heads, key_heads=key_heads, causal=True)
        begin = 0
        for length in LENGTHS:
            own = qkv[begin : begin + length].float().reshape(length, heads + 2 * key_heads, dim)
            q, k, v = torch.split(own.transpose(0, 1), [heads, key_heads, key_heads])
            wanted = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            assert apart(got[begin : begin + length], wanted.transpose(0, 1).reshape(length, -1)) < 2e-3
            begin += length


def check_decoder_steps(kit: Kit) -> None:
    steps, used = kit.decoder_steps, torch.tensor([102], dtype=torch.int32, device=kit.device)
    for hidden in (64, 72):
        x, residual, scale = (half(128, hidden, kit=kit, seed=seed) for seed in range(3))
        total, normed = steps.add_rms_norm(x, residual, scale[0], 1e-6, used)
        both = (x.float() + residual.float())[:102]
        assert apart(total[:102], both) < 4e-3
        assert apart(normed[:102], rms_norm(both, (hidden,), scale[0].float(), 1e-6)) < 8e-3
        wanted = silu(x.float()[:, : hidden // 2]) * x.float()[:, hidden // 2 :]
        assert apart(steps.gated(x, used)[:102], wanted[:102]) < 4e-3
        wide = [tensor.bfloat16() for tensor in (x, residual, scale[0])]  # products in it need a card
        total, normed = steps.add_rms_norm(*wide, 1e-6, used)
        both = (wide[0].float() + wide[1].float())[:102]
        assert apart(total[:102], both) < 4e-2
        assert apart(normed[:102], rms_norm(both, (hidden,), wide[2].float(), 1e-6)) < 8e-2
        assert apart(steps.gated(wide[0], used)[:102], wanted[:102]) < 8e-2
    heads, key_heads, dim = 3, 2, 24
    packed, turns = tokens_of(LENGTHS, kit), steps.turns_of(70, dim, 10_000.0, torch.device(kit.device))
    qkv, weights = half(256, 7 * dim, kit=kit), (half(dim, kit=kit, seed=1), half(dim, kit=kit, seed=2))
    before = qkv.float().reshape(256, 7, dim)[: sum(LENGTHS)].cpu()
    steps.norm_and_rotate(qkv, packed, turns, weights, 1e-6, (heads, key_heads))
    after = qkv.float().reshape(256, 7, dim)[: sum(LENGTHS)].cpu()
    assert torch.equal(after[:, 5:], before[:, 5:]), "values stay"
    q_scale, k_scale = (weight.float().cpu() for weight in weights)
    normed = torch.cat(
        [rms_norm(before[:, :3], (dim,), q_scale, 1e-6), rms_norm(before[:, 3:5], (dim,), k_scale, 1e-6)], 1
    )
    angles = packed.positions[: sum(LENGTHS), None].cpu() * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None]
    wanted = torch.complex(*normed.chunk(2, dim=-1)) * turned
    assert apart(after[:, :5], torch.cat([wanted.real, wanted.imag], dim=-1)) < 8e-3


def check_attention_bits(kit: Kit) -> None:
    """A window packed first and alone, and behind others at an odd place."""
    heads, dim, length = 2, 32, 90
    own = half(length, 3 * heads * dim, kit=kit)
    found = []
    for before in ((), (1, 64, 5), (33,)):
        qkv = half(256, 3 * heads * dim, kit=kit, seed=len(before) + 1)
        at = sum(before)
        qkv[at : at + length] = own
        out = kit.attention.attention(qkv, tokens_of((*before, length, 7), kit), heads)
        found.append(out[at : at + length])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def check_long_windows(kit: Kit) -> None:
    for length in (256, 512):
        qkv = half(512, 3 * 32, kit=kit)
        got = kit.attention.attention(qkv, tokens_of((length,), kit, tokens=512), 1)
        q, k, v = qkv[:length].float().chunk(3, dim=1)
        assert apart(got[:length], scaled_dot_product_attention(q[None], k[None], v[None])[0]) < 2e-3


def check_norms(kit: Kit) -> None:
    for hidden in (64, 72):
        x, residual = half(128, hidden, kit=kit), half(128, hidden, kit=kit, seed=1)
        norm = kit.layer_norm.Norm(half(hidden, kit=kit, seed=2), half(hidden, kit=kit, seed=3), 1e-12)
        used = torch.tensor([102], dtype=torch.int32, device=kit.device)
        got = kit.layer_norm.add_norm(x, residual, norm, used)[:102]
        both = (x.float() + residual.float())[:102]
        scale, shift = norm.weight.float(), norm.bias.float()
        assert apart(got, layer_norm(both, (hidden,), scale, shift, 1e-12)) < 8e-3
        words, places = half(140, hidden, kit=kit, seed=4), half(70, hidden, kit=kit, seed=5)
        packed = tokens_of(LENGTHS, kit)
        embedded = kit.layer_norm.embed(packed, words, places, x[0], norm)[: sum(LENGTHS)]
        ids, at = packed.ids[: sum(LENGTHS)].long(), packed.positions[: sum(LENGTHS)].long()
        wanted = words[ids].float() + places[at].float() + x[0].float()
        assert apart(embedded, layer_norm(wanted, (hidden,), scale, shift, 1e-12)) < 8e-3


def check_linear_add_norm(kit: Kit) -> None:
    """In one kernel for a hidden size of 384, in two for others."""
    for hidden, depth in ((384, 64), (384, 128), (72, 64)):
        x, weight = half(128, depth, kit=kit), half(hidden, depth, kit=kit, seed=1) / depth**0.5
        residual, bias = half(128, hidden, kit=kit, seed=2), half(hidden, kit=kit, seed=3)
        scale, shift = half(hidden, kit=kit, seed=4), half(hidden, kit=kit, seed=5)
        norm = kit.layer_norm.Norm(scale, shift, 1e-12)
        used = torch.tensor([100], dtype=torch.int32, device=kit.device)
        got = kit.linear_norm.linear_add_norm(x, (weight, bias), residual, norm, used)[:100]
        both = x.float() @ weight.float().T + bias.float() + residual.float()
        wanted = layer_norm(both, (hidden,), scale.float(), shift.float(), 1e-12)[:100]
        assert apart(got, wanted) < 8e-3
        moved = kit.linear_norm.linear_add_norm(x.roll(9, 0), (weight, bias), residual.roll(9, 0), norm, used)
        assert torch.equal(moved[9:100], got[:91])


def check_pooling(kit: Kit) -> None:
    packed = tokens_of(LENGTHS, kit)
    x = half(256, 72, kit=kit)
    x[sum(LENGTHS) :] = float("nan")
    means = kit.pool.mean_of_windows(x, packed.starts)
    firsts = kit.pool.first_of_windows(x, packed.starts)
    assert means.dtype == firsts.dtype == torch.float32
    assert means.shape == firsts.shape == (8, 72)
    begin = 0
    for window, length in enumerate(LENGTHS):
        rows = x[begin : begin + length].float()
        assert apart(means[window], rows.mean(dim=0)) < 1e-5
        assert torch.equal(firsts[window], rows[0])
        begin += length
    assert not means[len(LENGTHS) :].any()


CHECKS: tuple[Callable[[Kit], None], ...] = (
    *(check_linear, check_attention, check_attention_bits, check_long_windows, check_norms),
    *(check_linear_add_norm, check_pooling, check_causal_attention, check_decoder_steps),
)


@pytest.mark.skipif(triton.__version__.startswith("3.6."), reason="its interpreter fails with NumPy 2.4")
def test_interpreted() -> None:
    """Every check, on the CPU."""
    # a core for which OpenBLAS sums a row in the same order wherever it is
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    done = subprocess.run([sys.executable, __file__], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.splitlines() == [check.__name__ for check in CHECKS]


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_a_card(check: Callable[[Kit], None]) -> None:
    check(kit("cuda"))


def launched(kit: Kit) -> dict[str, tuple[dict[str, Any], int]]:
    """Of each kernel, the sizes with which MiniLM launches it, or Qwen3-Embedding-0.6B, and its warps."""
    tile, fused, norm, pool = kit.linear.TILE, kit.linear_norm, kit.layer_norm, kit.pool
    steps = kit.decoder_steps
    tiles = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    rows = {"HIDDEN": 384, "BLOCK": 512, "ROWS": norm.ROWS}
    blocks = {"BLOCK_M": kit.layout.QUERY_BLOCK, "BLOCK_N": kit.attention.KEY_BLOCK}
    return {
        "linear._linear": ({"N": 1536, "K": 384, "GELU": True, **tiles}, tile.warps),
        "linear_norm._linear_add_norm": (
            {"K": 1536, "BLOCK_M": fused.ROWS, "PART": fused.PART, "BLOCK_K": fused.DEPTH},
            fused.WARPS,
        ),
        "attention._attention": (
            {"HEADS": 12, "KEY_HEADS": 12, "CAUSAL": False, "DIM": 32, "BLOCK_D": 32, **blocks},
            kit.attention.WARPS,
        ),
        "attention._attention causal": (
            {"HEADS": 16, "KEY_HEADS": 8, "CAUSAL": True, "DIM": 128, "BLOCK_D": 128, **blocks},
            kit.attention.WARPS,
        ),
        "decoder_steps._add_rms_norm": ({"HIDDEN": 1024, "BLOCK": 1024, "ROWS": 4}, steps.WARPS),
        "decoder_steps._norm_and_rotate": (
            {"HEADS": 16, "ROTATED": 24, "WIDE": 4096, "HALF": 64, "BLOCK": 64, "ROWS": steps.MOST_ROWS},
            steps.WARPS,
        ),
        "decoder_steps._gated": (
            {"WIDTH": 3072, "COLUMNS": steps.COLUMNS, "ROWS": steps.MOST_ROWS},
            steps.WARPS,
        ),
        "layer_norm._add_norm": (rows, norm.WARPS),
        "layer_norm._embed": (rows, norm.WARPS),
        "pool._mean": ({"HIDDEN": 384, "ROWS": pool.ROWS, "COLUMNS": pool.COLUMNS}, pool.WARPS),
    }


KERNELS = (
    *("linear._linear", "linear_norm._linear_add_norm", "attention._attention"),
    *("layer_norm._add_norm", "layer_norm._embed", "pool._mean", "attention._attention causal"),
    *("decoder_steps._add_rms_norm", "decoder_steps._norm_and_rotate", "decoder_steps._gated"),
)
INTEGERS = ("used", "ids", "positions", "starts", "block_start", "block_first", "block_length")


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_an_h100_without_spills(name: str, tmp_path: Path) -> None:
    """Without a card. The interpreter accepts what the compiler does not. A decoder may be in bfloat16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ...support.kernels import nvrtc

    module, kernel = name.removesuffix(" causal").split(".")
    function = getattr(getattr(kit("cuda"), module), kernel)
    given = {"eps": "fp32", "scale": "fp32", "turns": "*fp32", **dict.fromkeys(INTEGERS, "*i32")}
    if module == "pool":
        given["out"] = "*fp32"
    names, (sizes, warps) = function.arg_names, launched(kit("cuda"))[name]
    stages = {"linear": kit("cuda").linear.TILE.stages, "linear_norm": kit("cuda").linear_norm.STAGES}
    options = {"num_warps": warps, "num_stages": stages.get(module, kit("cuda").attention.STAGES)}
    for half in ("*fp16", "*bf16") if module == "decoder_steps" or "causal" in name else ("*fp16",):
        types = {n: "constexpr" if n in sizes else given.get(n, half) for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
        values = {(names.index(n),): value for n, value in sizes.items()}
        source = ASTSource(function, types, values, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.metadata.shared <= 227 << 10
        assert ("wgmma" in compiled.asm["ptx"]) == (module in ("linear", "linear_norm", "attention"))
        if "wgmma" in compiled.asm["ptx"]:
            assert (".f32.bf16.bf16" in compiled.asm["ptx"]) == (half == "*bf16")
        used = nvrtc.dumped(compiled.asm["cubin"], tmp_path, "--dump-resource-usage")
        assert "LOCAL:0" in used and "STACK:0" in used, used


def test_a_layout_needs_whole_tiles() -> None:
    layout = kit("cpu").layout
    assert layout.Layout(256, 16).size == 2 * 256 + 17 + 3 * (256 // layout.QUERY_BLOCK + 16)
    for tokens, sequences in ((0, 1), (100, 1), (128, 0)):
        with pytest.raises(ValueError, match="multiples of 128"):
            layout.Layout(tokens, sequences)


if __name__ == "__main__":
    for one in CHECKS:
        one(kit("cpu"))
        print(one.__name__)
