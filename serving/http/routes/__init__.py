"""The endpoints, their request and response bodies (schemas), and their access rules (access)."""
