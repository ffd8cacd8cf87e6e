"""The policy of the A-MEM paper."""
