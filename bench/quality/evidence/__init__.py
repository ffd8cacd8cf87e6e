"""Evidence found, shown and remembered, without an LLM."""
