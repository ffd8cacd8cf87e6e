"""API keys, their limits, and the audit log."""
