"""What a real model makes of our prompts: planted details, and attempts to inject instructions."""
