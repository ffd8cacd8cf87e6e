"""Events for other systems: delivery of webhooks, and the signal that wakes streams."""
