"""A client of the sidecar, "consumer serve", to copy into a service. It needs Python 3.11 or later, and nothing else.

    sidecar = Sidecar("http://127.0.0.1:8080", fallback="open")
    answer = sidecar.take("checkout", tokens=2)
    if not answer["ok"]:
        print(f"denied, again in {answer['retry_after_ms']} ms")

A denial is an answer with ok False. If the sidecar or Redis is unavailable, a call that is safe to repeat is repeated
once, and then the answer is the fallback. A wrong call raises SidecarError.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
import uuid
from typing import Any, Literal, NotRequired, TypedDict
from urllib.parse import quote, urlencode, urlsplit

# The types are those of openapi.yaml, which the sidecar serves at /openapi.yaml.


class Amount(TypedDict):
    key: str
    tokens: NotRequired[int]  # 1 if left out
    flow: NotRequired[str]


class Result(TypedDict):
    key: str
    ok: bool  # whether the tokens were taken
    taken: int
    remaining: int
    limit: int  # the bucket's capacity; 0 if it is unknown
    retry_after_ms: int | None  # None if it is unknown
    reset_after_ms: int | None
    source: str  # who answered; "fallback:sidecar" is this client
    on_floor: NotRequired[bool]
    outstanding: NotRequired[int]
    shadow: NotRequired[bool]


class AllResult(TypedDict):
    ok: bool  # whether all were taken
    denied: str | None  # the first bucket with too few tokens
    retry_after_ms: int | None
    results: list[Result]


class LimitResult(TypedDict):
    name: str  # of the limit
    key: str
    ok: bool
    taken: int
    remaining: int
    limit: int
    retry_after_ms: int | None
    reset_after_ms: int | None
    source: str
    on_floor: NotRequired[bool]
    outstanding: NotRequired[int]
    shadow: NotRequired[bool]
    wait_ms: int  # how long to wait before the tokens may be used
    next_ms: NotRequired[int]
    denied_by: NotRequired[list[str]]
    undo: NotRequired[str]


class Reservation(TypedDict):
    key: str
    ok: bool  # whether the tokens are held
    taken: int
    remaining: int
    limit: int
    retry_after_ms: int | None
    reset_after_ms: int | None
    source: str
    on_floor: NotRequired[bool]
    shadow: NotRequired[bool]
    id: str | None  # for settle; None if there is nothing to settle
    until: str | None


class Settlement(TypedDict):
    key: str
    id: str
    returned: int
    clamped: int
    void: int
    charged: int
    owed: int
    forgiven: int
    remaining: int
    again: bool


class Check(TypedDict):
    """What the sidecar says about a request of the service: whether it may pass, and what its client gets."""

    ok: bool
    status: int  # of the answer if it may not pass: 429, or 503 if the sidecar is unavailable
    headers: dict[str, str]  # RateLimit and others
    body: bytes  # of that answer
    fallback: bool  # whether this client answered


class SidecarError(Exception):
    """An error of a call: it was wrong, or it is unknown whether it had an effect.

    status is that of HTTP, or 0 if there was no answer. unsent tells that the call had no effect.
    """

    def __init__(self, code: str, message: str, status: int = 0, unsent: bool = False) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.status, self.unsent = code, status, unsent

    @property
    def unavailable(self) -> bool:
        """Whether the fallback answers: there was no decision."""
        return self.status == 0 or self.status >= 500


class _Unix(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


_CHECK_HEADERS = (
    "RateLimit",
    "RateLimit-Policy",
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "Retry-After",
    "Content-Type",
)

# The sidecar closes connections that are idle for 30 s. This client does so first: a request on a connection that is
# just being closed has no answer.
_IDLE = 10.0

_Response = tuple[int, http.client.HTTPMessage, bytes]


class Sidecar:
    """A client with connections that it keeps. Threads may share it.

    url is http://host:port or unix:/path. timeout, in seconds, is that of each of the two tries. fallback says whether
    takes are admitted ("open") or denied ("closed") while there is no decision.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        timeout: float = 0.5,
        fallback: Literal["open", "closed"] = "open",
    ) -> None:
        self._url = urlsplit(url)
        self._timeout = timeout
        self._open = fallback == "open"
        self._lock = threading.Lock()
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []

    def close(self) -> None:
        """Closes the connections that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def take(self, key: str, *, tokens: int = 1, **options: str) -> Result:
        """Takes tokens, all or none. The options are leave, flow and request_id."""
        options.setdefault("request_id", str(uuid.uuid4()))
        answer = self._decide("/v1/take", {"key": key, "tokens": tokens, **options}, True)
        return answer or self._result(key)

    def take_all(self, requests: list[Amount], **options: str) -> AllResult:
        """Takes tokens of several buckets, all or none. The options are leave and request_id."""
        options.setdefault("request_id", str(uuid.uuid4()))
        answer = self._decide("/v1/take-all", {"requests": requests, **options}, True)
        if answer:
            return answer
        results = [self._result(r["key"]) for r in requests]
        denied = None if self._open or not requests else requests[0]["key"]
        return {"ok": self._open, "denied": denied, "retry_after_ms": self._retry_ms, "results": results}

    def take_limit(self, name: str, key: str, *, tokens: int = 1, **options: str) -> LimitResult:
        """Takes tokens of a limit by its name, for an option flow.

        The call has no request id: it is repeated only if it had no effect.
        """
        request = {"key": key, "tokens": tokens, **options}
        answer = self._decide(f"/v1/limits/{quote(name, safe='')}/take", request, False)
        return answer or {**self._result(key), "name": name, "wait_ms": 0}

    def reserve(self, key: str, *, ttl_ms: int, tokens: int = 1, **options: str) -> Reservation:
        """Holds tokens for work whose use is known later. The options are leave, flow, id and overrun; no fallback."""
        options.setdefault("id", str(uuid.uuid4()))
        return self._call("/v1/reserve", {"key": key, "tokens": tokens, "ttl_ms": ttl_ms, **options}, True)

    def settle(self, key: str, id: str, used: int) -> Settlement:
        """Ends a reservation of which so many tokens were used."""
        return self._call("/v1/settle", {"key": key, "id": id, "used": used}, True)

    def check(self, limit: str, key: str, tokens: int = 1) -> Check:
        """Asks whether a request of the service may pass, by a limit's name and a key."""
        path = "/v1/check?" + urlencode({"limit": limit, "key": key, "tokens": tokens})
        try:
            status, headers, body = self._repeat("GET", path, None, False)
        except SidecarError as e:
            if not e.unavailable:
                raise
            retry = {} if self._open else {"Retry-After": "1"}
            status = 200 if self._open else 503
            return {"ok": self._open, "status": status, "headers": retry, "body": b"", "fallback": True}
        kept = {name: headers[name] for name in _CHECK_HEADERS if name in headers}
        return {"ok": status == 200, "status": status, "headers": kept, "body": body, "fallback": False}

    @property
    def _retry_ms(self) -> int:
        return 0 if self._open else 1000

    def _result(self, key: str) -> Result:
        return {
            "key": key,
            "ok": self._open,
            "taken": 0,
            "remaining": 0,
            "limit": 0,
            "retry_after_ms": self._retry_ms,
            "reset_after_ms": None,
            "source": "fallback:sidecar",
        }

    def _decide(self, path: str, request: dict[str, Any], repeatable: bool) -> Any:
        """Makes a call; None if there was no decision."""
        try:
            return self._call(path, request, repeatable)
        except SidecarError as e:
            if e.unavailable:
                return None
            raise

    def _call(self, path: str, request: dict[str, Any], repeatable: bool) -> Any:
        _, _, body = self._repeat("POST", path, json.dumps(request).encode(), repeatable)
        return json.loads(body)

    def _repeat(self, method: str, path: str, body: bytes | None, repeatable: bool) -> _Response:
        """Makes a call once more if it failed and that is safe."""
        try:
            return self._send(method, path, body)
        except SidecarError as e:
            if not e.unavailable or not (repeatable or e.unsent):
                raise
        time.sleep(random.uniform(0.02, 0.05))  # so that the callers don't come at once
        return self._send(method, path, body)

    def _send(self, method: str, path: str, body: bytes | None) -> _Response:
        connection = self._connection()
        try:
            if connection.sock is None:
                connection.connect()
            headers = {"Host": "localhost"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as e:
            unsent = connection.sock is None or isinstance(e, (ConnectionRefusedError, FileNotFoundError))
            connection.close()
            raise SidecarError("unreachable", str(e) or type(e).__name__, unsent=unsent) from e
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append((time.monotonic(), connection))
        if response.status == 200 or response.headers.get("Content-Type") == "application/problem+json":
            return response.status, response.headers, answer
        code, message = str(response.status), answer.decode(errors="replace")
        try:
            error = json.loads(answer)
            code, message = error["code"], error["message"]
        except (ValueError, KeyError, TypeError):
            pass  # another program has answered
        raise SidecarError(code, message, response.status, code in ("busy", "shutting_down"))

    def _connection(self) -> http.client.HTTPConnection:
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if time.monotonic() - since < _IDLE:
                    return connection
                connection.close()
        if self._url.scheme == "unix":
            return _Unix(self._url.path, self._timeout)
        return http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=self._timeout)
