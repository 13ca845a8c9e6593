"""Polls the agents and keeps loads and the KV index in Redis."""
