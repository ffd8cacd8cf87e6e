"""The HTTP service: a FastAPI application over AsyncMemories, and the server that runs it.

hosting opens everything and serves; app and service hold the parts; middleware/ limits and authenticates;
routes/ has the endpoints and who may use them. An answer's event stream is in routes/search_and_answer.
"""
