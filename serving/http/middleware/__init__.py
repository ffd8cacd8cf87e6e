"""What a request passes on its way to an endpoint: keys, limits, idempotency."""
