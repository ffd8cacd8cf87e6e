"""Message streams into memory: Kafka topics and Redis streams."""
