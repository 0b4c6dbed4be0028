"""A hub of our own on this machine, which fails in the middle: what the Hugging Face libraries ask of one, and no more.

The name of a data set says what goes wrong with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

COMMIT = "a" * 40
CUT = 1000  # bytes of a file after which the connection to `cut` breaks, and of what `short` calls the whole file


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: ClassVar[Mapping[str, Mapping[str, bytes]]]  # of each data set
    asked: ClassVar[Counter[str]]  # how often `cut` and `busy` were asked for what they refuse at first

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._json({"error": "not here"}, 404)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/datasets/org/(\w+)(?:/revision/\w+)?", path):
            siblings = [{"rfilename": name} for name in self.files[found[1]]]
            busy = found[1] == "busy" and self._count("busy") == 1
            self._json(
                {"error": "later"} if busy else {"id": "org", "sha": COMMIT, "siblings": siblings}, 200 + 303 * busy
            )
        elif found := re.fullmatch(r"/api/datasets/org/(\w+)/tree/\w+(/.*)?", path):
            self._json([] if found[2] else [_entry(name, content) for name, content in self.files[found[1]].items()])
        elif (found := re.fullmatch(r"/datasets/org/(\w+)/resolve/\w+/(.*)", path)) and found[2] in self.files[
            found[1]
        ]:
            self._file(found[1], self.files[found[1]][found[2]])
        else:
            self._json({"error": "not found"}, 404)

    def _count(self, what: str) -> int:
        self.asked[what] += 1
        return self.asked[what]

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"X-Error-Code": "EntryNotFound"} if status == 404 else {})

    def _file(self, dataset: str, content: bytes) -> None:
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2] or len(content) - 1) + 1) if asked else (0, len(content))
        body = content[start:stop]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(content)}"
        fails = self.command == "GET" and len(body) > CUT and dataset in ("cut", "short")
        if fails and dataset == "short":
            body = body[:CUT]
        elif fails and self._count("cut") == 1:
            self._answer(206 if asked else 200, body, headers, send=CUT)
            return
        self._answer(206 if asked else 200, body, headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], send: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:send])
        self.close_connection |= send is not None


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}


@contextmanager
def hub_of(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, Counter[str]]]:
    """Its address while it serves `files` of data sets, and how often each was asked for what it refuses at first."""
    handler = type("Handler", (_Handler,), {"files": files, "asked": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
        finally:
            server.shutdown()
