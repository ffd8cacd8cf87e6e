"""Bulk ingest of many logs with Ray Data."""
