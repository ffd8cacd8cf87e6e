# Made of _async/ by `python -P serving/client/generate.py`: change that.
"""One of the two clients; the sync one is made of the async one."""
