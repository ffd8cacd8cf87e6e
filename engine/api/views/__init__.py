"""Read-only views of a store: reports, lists, statistics."""
