"""DualMap: cache-affine, load-aware routing for a cluster of LLM engines."""
