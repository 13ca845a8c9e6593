"""Generated from protos/dualmap/v1; never edited."""
