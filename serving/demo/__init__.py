"""The demo: a small conversation, its questions, and the run that shows them."""
