"""Local vLLM servers: started, watched, restarted; small models for tests."""
