"""The `dualmap` command: one file a subcommand."""

import os

# This process starts others while gRPC's threads run; its fork handlers would only complain of that, as a child execs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
