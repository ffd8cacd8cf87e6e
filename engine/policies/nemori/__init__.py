"""The policy of the NEMORI paper."""
