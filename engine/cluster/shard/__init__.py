"""One shard: an engine on its own thread, behind futures."""
