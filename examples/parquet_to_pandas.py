# %% [markdown]
# # From Parquet to memories to pandas
# Needs `pip install 'undertow[engine]' pandas` and an LLM server in `UNDERTOW_LLM_URL`. Editors show the
# cells of this file as a notebook; `python examples/parquet_to_pandas.py` runs it as it is.

# %%
import tempfile
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from undertow import Engine, Settings, export_tables, make_encoder, make_llm
from undertow.engine.api.views.reports import Reports

folder = Path(tempfile.mkdtemp(prefix="undertow-example-"))

# %% [markdown]
# ## A log as a table
# A row is a turn: whose it is, when, and its messages. Two people come back to one topic each.

# %%
topics = {"ann": "the pottery course and its kiln", "bob": "the boat and its sails"}
log = pd.DataFrame(
    {
        "tenant": tenant,
        "session": f"day {n}",
        "timestamp": pd.Timestamp("2026-05-01 10:00") + pd.Timedelta(days=n),
        "messages": [
            {"role": "user", "content": f"More about {topic}, part {n}."},
            {"role": "assistant", "content": "Tell me."},
        ],
        "metadata": {"app": "example"},
    }
    for n in range(8)
    for tenant, topic in topics.items()
)
log.to_parquet(folder / "log.parquet")

# %% [markdown]
# ## Store it
# The turns are durable and searchable when `add_table` returns; `drain` waits for the LLM's memories.

# %%
settings = Settings(theta_sim=0.5, theta_merge=0.6, theta_count=3)
with Engine(folder / "store", settings, make_encoder(settings), llm=make_llm(settings)) as engine:
    print(engine.add_table(pq.read_table(folder / "log.parquet")))
    engine.drain()
    for hit in engine.search("ann", "kiln").ranked(3):
        print(hit.kind, round(hit.score, 3), hit.memory)
    tables = export_tables(Reports(engine.journal).export("ann"))

# %% [markdown]
# ## Look at the memories
# `source_seqs` of a memory names the `seq` of the turns that it rests on.

# %%
turns, memories = tables["turns"].to_pandas(), tables["memories"].to_pandas()
current = memories[memories["superseded_at_seq"].isna() & ~memories["deleted"]]
print(current[["kind", "version", "text"]])
sources = current.explode("source_seqs").merge(turns, left_on="source_seqs", right_on="seq")
print(sources.groupby("id_x")["timestamp_y"].agg(["min", "max", "count"]))
