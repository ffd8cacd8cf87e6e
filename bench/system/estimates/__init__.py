"""How far estimates are from what runs cost."""
