"""Calls to a language model: client, servers, load balancing, replies."""
