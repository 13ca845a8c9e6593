"""Promises kept by services."""
