"""The systems that are compared."""
