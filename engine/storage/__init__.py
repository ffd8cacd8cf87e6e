"""Bytes on disk or in an object store: the journal, its fences, and how rows are coded."""
