"""Many shards as one engine. `ray/` needs Ray (the extra `cluster`); all else here does not."""
