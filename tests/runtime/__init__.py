"""Promises kept by runtime."""
