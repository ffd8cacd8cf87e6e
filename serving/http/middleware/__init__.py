"""What a request passes before its endpoint: log and span, id, key, rate, load, body limits, idempotency."""
