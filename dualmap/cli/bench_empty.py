"""`python -m dualmap.cli.bench_empty BYTES`: a bare gRPC thread-pool server whose calls do nothing, to compare with.

Same server type, options and number of threads as a router, no wrapping of ours: the floor that Python gRPC sets.
It also swallows traces, so that a traced router has a backend.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from dualmap.rpc.server import server_options
from dualmap.runtime.settings import ServerSettings

UNARY = "/dualmap.bench.Empty/Unary"
STREAM = "/dualmap.bench.Empty/Stream"
_TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_THREADS = 8


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._streams = ThreadPoolExecutor(64)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = handler_call_details.method
        if method == UNARY:
            return grpc.unary_unary_rpc_method_handler(self._unary)
        if method == _TRACES:
            return grpc.unary_unary_rpc_method_handler(self._swallow)
        if method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return None

    def _unary(self, _raw: bytes, _context: grpc.ServicerContext) -> bytes:
        return self._answer

    def _swallow(self, _raw: bytes, _context: grpc.ServicerContext) -> bytes:
        return b""

    def _stream(self, raws: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in raws:
            yield self._answer


def main() -> None:
    """Serve until SIGTERM; one JSON line on stdout says where."""
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=server_options(ServerSettings()))
    server.add_generic_rpc_handlers((_Handlers(bytes(int(sys.argv[1]))),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(0).wait()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
