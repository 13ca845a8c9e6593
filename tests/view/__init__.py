"""Promises kept by view."""
