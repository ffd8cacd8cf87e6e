"""Ranking: dense and keyword scores, filters by time and metadata, answer modes."""
