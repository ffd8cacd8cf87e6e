"""A tenant's live state, and its replay from the journal."""
