"""Membership, leases, ring parameters, epochs, heat tree, split table."""
