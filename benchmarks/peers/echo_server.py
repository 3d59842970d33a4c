"""Floor: the bare native transport. Answers every call with the bytes it came with.

    python echo_server.py 127.0.0.1:PORT

What this costs, no server on the same transport can avoid: nothing is parsed, queued,
batched or built.
"""

from __future__ import annotations

import sys

from pygrpc_native import EVENT_CALL, NativeGrpcFront


def main(address: str) -> None:
    """Serves until it is killed."""
    method = "/inference.GRPCInferenceService/ModelInfer"
    front = NativeGrpcFront(address, [(method, False)], io_threads=1)
    front.start()
    while (events := front.recv_batch(256)) is not None:
        for kind, call, _method, payload, _client in events:
            if kind == EVENT_CALL:
                front.respond(call, payload)


if __name__ == "__main__":
    main(sys.argv[1])
