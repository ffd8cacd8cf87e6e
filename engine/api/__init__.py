"""The public calls of one engine."""
