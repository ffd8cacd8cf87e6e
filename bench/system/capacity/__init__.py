"""The capacity model."""
