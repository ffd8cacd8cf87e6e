"""Shards in processes of one machine, without Ray: the router talks to them over sockets."""
