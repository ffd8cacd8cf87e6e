"""The policy of the HiMem paper."""
