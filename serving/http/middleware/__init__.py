"""What a request passes before its endpoint: log and span, id, key and rate, load, body limits, idempotency."""
