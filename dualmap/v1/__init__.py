"""Generated from protos/, committed, never edited: run `make proto`."""
