"""The kubelet's part of bench_dra, in a process of its own: `python -m tests.bench.claim_client SOCKET CLAIMS`.

Each line of standard input, an RPC and `one_at_a_time` or `at_once`, makes the call for each of the claims (names and UIDs as
`ClaimNode.claim` makes them). The answer on standard output is the seconds from the first call to the last answer.
"""

import os
import sys

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from tests.bench.figures import Stopwatch
from tests.kubelet_api import dra


def main(path: str, claims: int) -> None:
    refs = [dra.Claim(namespace="bench", name=f"claim-{number}", uid=f"uid-{number}") for number in range(claims)]
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        for line in sys.stdin:
            rpc, order = line.split()
            message = getattr(dra, f"Node{rpc}ResourcesRequest")
            requests = [message(claims=[ref]).SerializeToString() for ref in refs]
            method = channel.unary_unary(f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/Node{rpc}Resources")
            with Stopwatch() as watch:
                if order == "one_at_a_time":
                    for request in requests:
                        method(request, timeout=60)
                else:
                    for call in [method.future(request, timeout=60) for request in requests]:
                        call.result()
            print(watch.seconds, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
