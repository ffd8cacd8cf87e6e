"""`undertow eval`: answers to benchmark questions, or their evidence alone."""
