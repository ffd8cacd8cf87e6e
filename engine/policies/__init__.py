"""Consolidation policies: coroutines that read like their papers."""
