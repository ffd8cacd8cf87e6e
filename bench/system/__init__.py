"""Benchmarks of whole systems: ingest, service, cluster."""
