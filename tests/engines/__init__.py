"""Promises kept by engines."""
