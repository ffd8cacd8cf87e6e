"""The GPU path against the limits of the card."""
