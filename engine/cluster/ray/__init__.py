"""Shards as Ray actors, and the cluster that starts them."""
