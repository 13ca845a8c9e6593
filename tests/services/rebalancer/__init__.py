"""Promises kept by services/rebalancer."""
