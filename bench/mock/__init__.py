"""A mock LLM, in process and as an OpenAI-compatible server."""
