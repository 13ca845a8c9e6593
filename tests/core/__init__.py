"""Promises kept by core."""
