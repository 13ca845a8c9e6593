"""Promises kept by rpc."""
