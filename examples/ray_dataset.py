"""A Ray dataset into a cluster of shards: python examples/ray_dataset.py LOGS.parquet

Needs `pip install 'undertow[cluster]'`. The shards end with this program; with connect("auto") and without
`cluster.stop()` they stay on the Ray cluster that runs here.
"""

import sys

import ray

from undertow import Cluster, Settings, connect, write_turns

ROOT = "cluster-memories"  # on storage that all nodes share


def main(logs: str) -> None:
    connect("local", num_cpus=4)  # two shards, and tasks that read beside them
    settings = Settings()
    dataset = ray.data.read_parquet(logs)  # columns of the messages format; map and filter as you like
    print(write_turns(dataset, ROOT, settings, source=logs, shards=2))
    with Cluster.open(ROOT, settings) as cluster:
        print(cluster.stats())
        cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1])
