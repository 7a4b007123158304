"""An application with the middleware, on a small server for ASGI: python3 server.py URL FALLBACK PORT"""

import asyncio
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/python"))

from asgi import RateLimit  # noqa: E402
from refiller import Sidecar  # noqa: E402

url, fallback, port = sys.argv[1:]


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def user(scope):
    return dict(scope["headers"])[b"x-user"].decode()


app = RateLimit(hello, sidecar=Sidecar(url, fallback=fallback), limit="api", key=user)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asyncio.run(app(self.scope(), None, self.send))

    def scope(self):
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        return {"type": "http", "method": "GET", "path": self.path, "headers": headers, "client": self.client_address}

    async def send(self, message):
        if message["type"] == "http.response.body":
            self.wfile.write(message["body"])
            return
        self.send_response(message["status"])
        for name, value in message["headers"]:
            self.send_header(name.decode(), value.decode())
        self.end_headers()

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


Server(("127.0.0.1", int(port)), Handler).serve_forever()
