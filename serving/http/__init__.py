"""The HTTP face: a FastAPI application over `Memories`, and the server that runs it."""
