"""Events told to other systems: webhooks, and the wake-up of who follows a stream."""
