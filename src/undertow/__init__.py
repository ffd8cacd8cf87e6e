"""Undertow: long-term memory for LLM agents."""
