"""Promises kept by cli."""
