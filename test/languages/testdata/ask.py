"""Makes one call of the client and prints its answer: python3 ask.py URL FALLBACK METHOD ARGUMENT..."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/python"))

from refiller import Sidecar, SidecarError  # noqa: E402

url, fallback, method, *args = sys.argv[1:]
sidecar = Sidecar(url, fallback=fallback, timeout=1)
try:
    answer = getattr(sidecar, method)(*[json.loads(a) for a in args])
except SidecarError as e:
    answer = {"error": str(e)}
print(json.dumps(answer, default=bytes.decode))
