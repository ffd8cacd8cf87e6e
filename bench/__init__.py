"""Benchmarks, and the mock LLM server that tests and benchmarks talk to."""
