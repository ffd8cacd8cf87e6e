"""Metrics, logs and traces of the service."""
