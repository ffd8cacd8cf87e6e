"""The service under load: worlds of tenants that decide every turn, open and closed loops, comparisons."""
