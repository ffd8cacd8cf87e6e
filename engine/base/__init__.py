"""Words that every floor uses: turns and memories, settings, timestamps, traces. Imports nothing of ours."""
