"""Load: put new blocks through a sidecar until standard input ends; says how many bytes were put.

python -m bench.load SOCKET BYTES_A_PUT PAUSE_S
"""

import itertools
import select
import sys

import torch

from bench.engine import MIB, Engine, chain, ring
from tierkv_connectors.sidecar import connect


def main() -> int:
    path, nbytes, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    blocks = ring(MIB, 7, nbytes)
    client = connect(path, client="load", timeout_s=30.0)
    engine = Engine(client, blocks, blocks)
    print("ready", flush=True)
    done = 0
    for seed in itertools.count(1 << 40):
        engine.put(chain(seed, len(blocks)))
        done += nbytes
        if select.select([sys.stdin], [], [], pause)[0]:
            break
    client.close()
    print(done, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
