"""The `dualmap` command, one file a command."""
