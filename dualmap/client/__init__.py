"""The Python client: routers in turn, retry on the backup."""
