"""What has come to a shard, when the shard ends."""

from __future__ import annotations

from concurrent.futures import Future

from undertow.engine.cluster.shard.arrivals import Arrivals, ShardClosed
from undertow.engine.cluster.shard.commands import Command
from undertow.engine.cluster.shard.quick import never


def test_a_command_with_parts_left_fails_whether_it_waits_at_the_end_or_comes_back_after_it() -> None:
    arrivals, (waits, comes_back) = Arrivals("s0", 1), [Command(lambda: None, Future(), never) for _ in "ab"]
    assert waits.begin() and comes_back.begin()
    arrivals.put_part(waits)
    assert list(arrivals.close()) == [waits] and not arrivals.parts and not waits.future.done()
    arrivals.put_part(comes_back)  # from a round beside the end
    assert isinstance(comes_back.future.exception(0), ShardClosed) and not arrivals.parts
