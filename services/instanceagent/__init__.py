"""The queue before an engine, its KV index, its measured cost."""
