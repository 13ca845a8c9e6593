"""Promises kept by services/instanceagent."""
