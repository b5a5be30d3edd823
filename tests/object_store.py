"""An S3 server of this process: a bucket in memory that can be listed and read, and that fails as it is told to."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY_ID = "finlm-test"
_PAGE = 1000  # keys a page at most, as S3 has it


class Server(ThreadingHTTPServer):
    """One bucket, `corpus`. Answers S3's ListObjectsV2, HeadObject and GetObject to requests signed by KEY_ID."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()  # by method and key or listing
        self.busy = 0  # so many requests are answered by 503
        self.short: set[str] = set()  # keys whose body ends early
        self.forbidden: set[str] = set()  # keys, and prefixes that may not be listed
        self.changes: dict[str, tuple[int, bytes]] = {}  # a key's new bytes after so many reads of it

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the AWS tools are told, to find it and to be let in."""
        keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": "none"}
        return {"AWS_ENDPOINT_URL": self.url, **keys, "AWS_DEFAULT_REGION": "us-east-1"}


class _Handler(BaseHTTPRequestHandler):
    """A request to the server."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Answer as S3 does."""
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        self.server.requests[f"{self.command} {key or 'list'}"] += 1
        if self.server.busy:
            self.server.busy -= 1
            return self._fail(503, "SlowDown", "Please reduce your request rate.")
        if f"Credential={KEY_ID}/" not in self.headers.get("Authorization", ""):
            return self._fail(403, "InvalidAccessKeyId", "The access key id does not exist in our records.")
        if bucket != "corpus":
            return self._fail(404, "NoSuchBucket", "The specified bucket does not exist")
        if not key:
            return self._list(query)
        if key not in self.server.objects:
            return self._fail(404, "NoSuchKey", "The specified key does not exist.")
        if key in self.server.forbidden:
            return self._fail(403, "AccessDenied", "Access Denied")
        self._give(key)

    def _give(self, key: str) -> None:
        """Send an object, or the range of it that is asked for."""
        if self.command == "GET" and key in self.server.changes:
            left, data = self.server.changes.pop(key)
            if left:
                self.server.changes[key] = left - 1, data
            else:
                self.server.objects[key] = data
        data = self.server.objects[key]
        about = {"ETag": _tag(data), "Last-Modified": formatdate(1_700_000_000, usegmt=True)}
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(data), len(data))
            if int(first) >= len(data):
                return self._fail(416, "InvalidRange", "The requested range is not satisfiable")
            about["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            data = data[int(first) : end]
        self._send(206 if wanted else 200, data, about, len(data) // 2 if key in self.server.short else None)

    def _list(self, query: dict[str, str]) -> None:
        """Send a page of the bucket's keys."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if prefix in self.server.forbidden:
            return self._fail(403, "AccessDenied", "Access Denied")
        names: dict[str, bool] = {}  # whether it is a key, not a directory
        for key in sorted(self.server.objects):
            if key.startswith(prefix):
                inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
                names[prefix + inner + found] = not found
        after = query.get("continuation-token", query.get("start-after", ""))
        page = [name for name in names if name > after][: int(query.get("max-keys", _PAGE))]
        more = bool(page) and page[-1] != list(names)[-1]
        body = "".join(self._entry(name) if names[name] else _prefix(name) for name in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self._send_xml(
            200,
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>corpus</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount><MaxKeys>{_PAGE}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{body}</ListBucketResult>",
        )

    def _entry(self, key: str) -> str:
        """Return what a listing says of a key."""
        data = self.server.objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _fail(self, status: int, code: str, message: str) -> None:
        """Send an error."""
        self._send_xml(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")

    def _send_xml(self, status: int, body: str) -> None:
        """Send an XML document."""
        data = f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode()
        self._send(status, data, {"Content-Type": "application/xml"})

    def _send(self, status: int, data: bytes, about: dict[str, str], length: int | None = None) -> None:
        """Send an answer; of its body only the first `length` bytes, where that is given."""
        self.send_response(status)
        for name, value in about.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if length is None else data[:length])
        if length is not None:
            self.close_connection = True


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _prefix(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


@contextmanager
def serve() -> Iterator[Server]:
    """Run the server in the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
