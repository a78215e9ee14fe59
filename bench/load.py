"""Load: put new blocks through a sidecar and scrape its /metrics until standard input ends.

python -m bench.load SOCKET BYTES_A_PUT PAUSE_S PORT SCRAPE_PAUSE_S

Says at the end how many bytes were put and how many scrapes were answered. It is a process of its
own: a thread beside what is measured would keep the interpreter from it.
"""

import itertools
import select
import sys
import threading
import urllib.request

import torch

from bench.engine import MIB, Engine, chain, ring
from tierkv_connectors.sidecar import connect


def main() -> int:
    path, nbytes, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    port, scrape_pause = int(sys.argv[4]), float(sys.argv[5])
    ended = threading.Event()
    scrapes: list[int] = []

    def scrape() -> None:
        while not ended.wait(scrape_pause):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                scrapes.append(len(answer.read()))

    torch.set_num_threads(1)
    blocks = ring(MIB, 7, nbytes)
    client = connect(path, client="load", timeout_s=30.0)
    engine = Engine(client, blocks, blocks)
    scraping = threading.Thread(target=scrape)
    scraping.start()
    print("ready", flush=True)
    done = 0
    try:
        for seed in itertools.count(1 << 40):
            engine.put(chain(seed, len(blocks)))
            done += nbytes
            if select.select([sys.stdin], [], [], pause)[0]:
                break
    finally:
        ended.set()
        scraping.join()
    client.close()
    print(done, len(scrapes), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
