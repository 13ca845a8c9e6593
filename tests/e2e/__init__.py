"""Promises kept by e2e."""
