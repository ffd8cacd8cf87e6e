"""The calls of MemoryApi at a shard."""
