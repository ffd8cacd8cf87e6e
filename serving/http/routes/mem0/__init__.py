"""mem0's hosted routes, for its unchanged client: each becomes requests to the service's own routes."""
