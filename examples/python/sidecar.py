"""Takes tokens through the sidecar: consumer serve --limits limits.yaml. Nothing but Python is needed.

    python3 sidecar.py http://127.0.0.1:8080 BUCKET LIMIT KEY
"""

import http.client
import json
import sys
import time
from urllib.parse import urlsplit


class Sidecar:
    """A connection to the sidecar. A denial is an answer with ok false; what fails is an exception with a code."""

    def __init__(self, url, timeout=2.0):
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)

    def call(self, path, **body):
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{response.status} {answer['code']}: {answer['message']}")
        return answer

    def take(self, bucket, tokens=1):
        return self.call("/v1/take", key=bucket, tokens=tokens)

    def take_from(self, limit, key, tokens=1):
        return self.call(f"/v1/limits/{limit}/take", key=key, tokens=tokens)


def main(url, bucket, limit, key):
    sidecar = Sidecar(url)
    while (answer := sidecar.take(bucket))["ok"]:
        print(f"{bucket}: taken, {answer['remaining']} left")
    print(f"{bucket}: denied, again in {answer['retry_after_ms'] / 1000:.0f} s")

    answer = sidecar.take_from(limit, key)
    if answer["ok"]:
        time.sleep(answer["wait_ms"] / 1000)  # a limit of pacing says when
    print(f"{limit}: {'taken' if answer['ok'] else 'denied'}, {answer['remaining']} left")

    reservation = sidecar.call("/v1/reserve", key=bucket + "-jobs", tokens=5, ttl_ms=60_000)
    settled = sidecar.call("/v1/settle", key=bucket + "-jobs", id=reservation["id"], used=3)
    print(f"{bucket}-jobs: reserved 5, used 3, {settled['returned']} returned")

    try:
        sidecar.take("no-such-bucket")
    except RuntimeError as e:
        print(e)


if __name__ == "__main__":
    main(*sys.argv[1:])
