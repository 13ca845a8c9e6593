"""Promises kept by client."""
