"""Promises kept by store."""
