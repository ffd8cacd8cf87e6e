"""One of the two clients; the sync one is made of the async one."""
