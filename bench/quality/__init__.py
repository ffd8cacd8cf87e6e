"""How well memories are found (and, later, answered from): LoCoMo and LongMemEval."""
