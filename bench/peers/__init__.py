"""Other memory systems as their users have them: real packages, in an environment of their own (.venv-peers).

Their side of this folder is `runner`, the two `*_runner` modules and `mem0_server`; ours are `process`
and `throughput`.
"""
