"""Other memory systems as their users have them: real packages, in an environment of their own (.venv-peers).

Their side of this folder is `runner` and the two `*_runner` modules; ours is `process`, `peer`, `throughput`.
"""
