"""Promises kept by services/router."""
