"""The virtual-time cluster, which uses dualmap.core itself and not a copy of it."""
