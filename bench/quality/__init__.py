"""How well memories are found and answered from: LoCoMo and LongMemEval."""

from typing import Literal

Benchmark = Literal["locomo", "longmemeval"]
