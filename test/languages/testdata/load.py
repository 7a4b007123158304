"""Takes from bucket load until standard input ends, and prints how many takes got which answer: python3 load.py URL"""

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/python"))

from refiller import Sidecar  # noqa: E402

sidecar = Sidecar(sys.argv[1])
stop = threading.Event()
sources = {"shared": 0, "fallback": 0}
lock = threading.Lock()


def load() -> None:
    while not stop.is_set():
        source = sidecar.take("load")["source"].split(":")[0]
        with lock:
            sources[source] += 1


threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
sys.stdin.read()
stop.set()
for thread in threads:
    thread.join()
print(json.dumps(sources))
