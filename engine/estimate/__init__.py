"""What a log will cost, before any LLM call; thresholds for an encoder."""
