"""`python -m dualmap.cli.probe`: is the server here ready? Exit code 0 says yes; made for container health checks.

Imports gRPC and nothing else, as it runs every few seconds beside each service.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc

# grpc.health.v1 in bytes: generated code would double the start time.
_CHECK = "/grpc.health.v1.Health/Check"
_NAME_FIELD = b"\x0a"
_SERVING = b"\x08\x01"
_LONGEST_NAME = 127


def probe(address: str, component: str = "", timeout_s: float = 2.0) -> str | None:
    """Ask one server; None when it serves, else what is wrong in a few words.

    ``component`` is a gRPC health name: "" for readiness, "liveness", or one of the server's components. Raises
    ValueError for a name longer than 127 bytes.
    """
    name = component.encode()
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"component names have at most {_LONGEST_NAME} bytes")
    request = _NAME_FIELD + bytes([len(name)]) + name if name else b""
    with grpc.insecure_channel(address) as channel:
        # Raw bytes both ways: no (de)serializer.
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
        try:
            answer = check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}"
    return None if answer == _SERVING else f"{address}: not serving"


def main(argv: Sequence[str] | None = None) -> int:
    """Probe one server of this machine; gives the exit code."""
    parser = argparse.ArgumentParser(prog="dualmap.cli.probe", description="Ask a server whether it is ready.")
    parser.add_argument(
        "address",
        nargs="?",
        default=f"127.0.0.1:{os.environ.get('DUALMAP_SERVER__PORT', '7070')}",
        help="host:port; this machine's DUALMAP_SERVER__PORT when absent",
    )
    parser.add_argument("--component", default="", help="gRPC health name; readiness when absent")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="longest wait for the answer")
    arguments = parser.parse_args(argv)
    problem = probe(arguments.address, arguments.component, arguments.timeout_s)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
