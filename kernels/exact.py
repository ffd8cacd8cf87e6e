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


def error_slack(dim: int) -> float:
    """How far the fp32 score of two vectors can be from the exact one."""
    terms = dim * 2.0**-24
    # the last term covers the underflow that a float32 query (top-k takes them) can meet
    return terms / (1.0 - terms) * MAX_NORM**2 + 2.0**-100
