"""The router: finds the shard of each tenant, sends calls, aggregates results."""
