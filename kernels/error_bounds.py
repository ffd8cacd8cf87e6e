"""Why scores are exact, and how far an fp32 score can be from them; every kernel rests on this.

Vectors hold fp16 values and have a norm of at most MAX_NORM = 4. A product of
two fp16 numbers is a multiple of 2**-48, and no partial sum of |a_i b_i| exceeds |a| |b| <= 16 =
2**4, so every partial sum of a dot product is an integer multiple of 2**-48 below 2**52 of them: fp64
holds each one exactly, in any order of summation, with or without fused multiply-add.
A scan first computes a score in fp32, whose error is, for any order of summation over n terms,
    |fp32(a.b) - a.b| <= gamma_n * sum |a_i b_i| <= gamma_n * |a| * |b|,  gamma_n = n u / (1 - n u)
with u = 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5; nothing
underflows, as products are multiples of 2**-48). So slack = gamma_n * MAX_NORM**2 (3.7e-4 for n = 384)
bounds it, and a row is scored again in fp64 unless its fp32 score is further than slack from every
boundary that it could cross: the threshold, and the worst of the k best rows found so far.
"""

from __future__ import annotations

MAX_NORM = 4.0

# For int8 codes (kernels/arena/row_codes.py), let q = s_q c_q + e_q and x = s_x c_x + e_x. Their score
# s_q s_x (c_q . c_x) differs from q.x by e_q . x + s_q c_q . e_x, which Cauchy-Schwarz bounds by
# |e_q| |x| + (|q| + |e_q|) |e_x|, of the norms kept with the codes. The integer product is exact, below
# 2**31 for up to 133,000 values. Up to 65,536 of them |e_x| <= 0.71 |x|, so that scores are at most 47 and
# bounds at most 31. A relative error of 2**-24 each have three operations of a score, four of a bound, their
# sum (78), and for the lowest score four of twice the bound (62) and the difference (78): 4e-5 together, and
# less than this.
CODE_SLACK = 2.0**-14


def error_slack(dim: int) -> float:
    """How far the fp32 score of two vectors can be from the exact one."""
    terms = dim * 2.0**-24
    return terms / (1.0 - terms) * MAX_NORM**2


def tensor_core_slack(dim: int) -> float:
    """How far the score of a tensor core (fp16 in, fp32 sums) can be from the exact one.

    A tensor core adds b products and the running sum in one go, b being 4, 8 or 16 by generation: it
    cuts each addend off below 2**-23 of the power of two to which all are aligned, or later, and then
    cuts the sum to fp32 (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, 2021,
    for V100 to A100; Khattak and Mikaitis, Accurate models of NVIDIA tensor cores, arXiv 2512.07004,
    for H100, which keeps two bits more). NVIDIA documents none of this, and the tests put it to the
    card. The bound holds for any b >= 1 and any order:
    - Products are exact. Addends are aligned to the largest exponent among them, and one that has it
      loses nothing: so b of the b + 1 addends lose something, and the sum once more, which is at most
      b + 1 <= 2 b errors for b products.
    - That power of two is at most the largest addend in magnitude, or 2**-12 (where the exponent is that
      of a subnormal number, 2**-14, times a number of up to 4). Products are at most 16 = MAX_NORM**2,
      and so is every exact partial sum; a computed one is at most 16 + E, with E the error so far.
      Hence each error is below 2**-23 (16 + E).
    - For n products, padding included, E <= c (16 + E) with c = 2 n 2**-23, so E <= 16 c / (1 - c).
    That is 1.5e-3 for n = 384. It covers plain fp32 sums, too.
    """
    products = -(-dim // 32) * 32
    errors = 2.0 * products * 2.0**-23
    return errors / (1.0 - errors) * MAX_NORM**2
