"""The MCP face: memories as tools for agents. It is a client of the HTTP face, over a network or in process.

So keys, limits and errors are the HTTP face's own; what is here is how tools are described to an LLM.
"""
