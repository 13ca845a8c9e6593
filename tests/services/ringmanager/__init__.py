"""Promises kept by services/ringmanager."""
