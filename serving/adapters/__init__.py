"""Memories for agent frameworks: one file for each framework, which that file alone imports."""
