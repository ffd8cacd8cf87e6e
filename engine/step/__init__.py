"""The step loop: admit turns, ask the gate, run policies, commit."""
