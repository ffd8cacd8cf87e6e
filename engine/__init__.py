"""The engine: log and cursor, scheduler, policies, journal. Imports kernels/, never serving/."""
