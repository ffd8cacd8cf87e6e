"""Benchmarks of one part: gate, encoder."""
