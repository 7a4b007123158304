"""Takes tokens from Redis itself, with the scripts of the project (../scripts) and redis-py.

    python3 direct.py redis://127.0.0.1:6379/0 BUCKET
"""

import sys
from pathlib import Path

import redis

SCRIPTS = Path(__file__).parent.parent / "scripts"


class Bucket:
    """A bucket that refillers fill. Its name has 1 to 512 bytes and no closing brace."""

    def __init__(self, client, name):
        self.name, self.control = name, "{%s}:ctl" % name
        self.index = "{%s}" % name
        self.takes = client.register_script((SCRIPTS / "takes.lua").read_text())
        self.give_back = client.register_script((SCRIPTS / "return.lua").read_text())

    def take(self, n=1):
        """Takes n tokens, all or nothing. Returns (taken, left, era, microseconds until n are due or -1)."""
        # No templates; one bucket: without a template, which isn't created, without its policy, in no line, held for no
        # script, with one run: one take of n tokens that may leave none.
        reply = self.takes([self.name, self.control], [0, 0, 0, 0, 0, 0, 1, n, 1, 0])
        _now, status = reply[:2]
        if status == 2:
            raise KeyError(self.name)
        if status != 1:
            raise ValueError(f"{self.name}: another program uses the key")
        left, era = reply[2], reply[3]
        numbers = reply[7]  # of the policy, if it is told
        taken, wait = reply[8 + numbers :]
        return taken == 1, left, era, wait

    def put_back(self, n, era):
        """Returns n tokens of an era. What the bucket can't hold is dropped."""
        return self.give_back([self.name, self.index, self.control], [n, era])[0] == 1


def main(url, name):
    # A script that takes must not be sent twice because its answer was lost, so there are no retries.
    client = redis.Redis.from_url(url, socket_timeout=2.0, retry=None)
    bucket = Bucket(client, name)
    while True:
        ok, left, era, wait = bucket.take()
        if not ok:
            print(f"{name}: denied, again in {wait / 1e6:.0f} s")
            break
        print(f"{name}: taken, {left} left")
    print(f"{name}: {'returned' if bucket.put_back(1, era) else 'not returned'}")
    print(f"{name}: {'taken' if bucket.take()[0] else 'denied'} again")
    try:
        Bucket(client, "no-such-bucket").take()
    except KeyError as e:
        print("unknown bucket", e)


if __name__ == "__main__":
    main(*sys.argv[1:])
