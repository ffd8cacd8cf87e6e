"""Prompt-injection attempts, and what they change."""
