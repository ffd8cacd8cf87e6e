"""The policy of the MemoryOS paper."""
