"""Adding and removing shards: tenants move between journals."""
