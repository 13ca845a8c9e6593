"""Redis: the only place that knows a key name, a command or a TTL."""
