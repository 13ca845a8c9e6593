"""Follows Redis: ring, loads, KV index and their freshness; decides nothing."""
