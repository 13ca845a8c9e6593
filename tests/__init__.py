"""Promises kept by this project."""
