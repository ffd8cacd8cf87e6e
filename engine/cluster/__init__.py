"""Many shards as one engine. `Cluster` needs Ray (the extra `cluster`); all else here does not.

`cluster.Cluster`: Engine's calls over all shards of a root, on Ray. `resources.ClusterSettings`: what a
shard may use. `wire`: turns and receipts as Arrow tables.
"""
