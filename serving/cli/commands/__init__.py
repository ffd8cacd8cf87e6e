"""The commands, one file or folder a group."""
