"""Promises kept by simulator."""
