"""Bulk ingest of many logs: read on a Ray cluster, fed by one router."""
