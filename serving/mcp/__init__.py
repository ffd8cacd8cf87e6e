"""The MCP interface: memories as tools for agents. It is a client of the HTTP API, so keys, limits and errors
are the API's own; this package describes the tools to an LLM.
"""
