"""Promises kept by services/statecollector."""
