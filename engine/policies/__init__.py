"""What becomes a memory and when: one policy a file or folder, each after its paper."""
