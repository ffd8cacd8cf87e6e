"""The faces of the engine: the command line, and the local servers it can start."""
