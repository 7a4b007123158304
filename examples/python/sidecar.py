"""Takes tokens through the sidecar: consumer serve --limits limits.yaml. Nothing but Python is needed.

    python3 sidecar.py http://127.0.0.1:8080 BUCKET LIMIT KEY
"""

import sys
import time

from refiller import Sidecar, SidecarError


def main(url: str, bucket: str, limit: str, key: str) -> None:
    sidecar = Sidecar(url, timeout=5, fallback="closed")
    while (answer := sidecar.take(bucket))["ok"]:
        print(f"{bucket}: taken, {answer['remaining']} left")
    print(f"{bucket}: denied, again in {(answer['retry_after_ms'] or 0) / 1000:.0f} s")

    place = sidecar.take_limit(limit, key)
    if place["ok"]:
        time.sleep(place["wait_ms"] / 1000)  # a limit of pacing says when
    print(f"{limit}: {'taken' if place['ok'] else 'denied'}, {place['remaining']} left")

    reservation = sidecar.reserve(bucket + "-jobs", tokens=5, ttl_ms=60_000)
    if reservation["id"]:
        settled = sidecar.settle(bucket + "-jobs", reservation["id"], 3)
        print(f"{bucket}-jobs: reserved 5, used 3, {settled['returned']} returned")

    try:
        sidecar.take("no-such-bucket")
    except SidecarError as e:
        print(e)


if __name__ == "__main__":
    main(*sys.argv[1:])
