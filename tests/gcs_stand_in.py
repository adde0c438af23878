"""Google Cloud Storage on this machine: the JSON API, as far as gcsfs and TensorStore speak it.

The clients are the real ones; STORAGE_EMULATOR_HOST and TENSORSTORE_GCS_HTTP_URL send them here.
Objects are whole or absent, generations count up, and ifGenerationMatch=0 makes an object once.
"""

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

# What gcsfs, TensorStore, array_record and Google's own client look for.
HOSTS = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL", "CLOUD_STORAGE_EMULATOR_ENDPOINT")

# Asks Google's own machines over gRPC what kind of bucket it is. Read when gcsfs is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


@dataclasses.dataclass(frozen=True)
class Object:
    """One object: its content, when it was made, and whether of others: then it has no MD5."""

    content: bytes
    generation: int
    composed: bool = False


class GcsStandIn:
    """A server on localhost.

    Attributes:
      buckets: objects by name, by bucket; a test may put in and take out what it likes.
      refuse: asked before each request with its method, bucket and object ("" for the bucket's own
        and for listings); returns the HTTP status to answer with, or None to do it.
      requests: method, bucket and object of each, in order.
    """

    SETTINGS = {
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "a token",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "NO_GCE_CHECK": "true",
    }

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Object]] = {}
        self.refuse: Callable[[str, str, str], int | None] = lambda *_: None
        self.requests: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()
        self.generations = itertools.count(1)
        self.uploads: dict[str, tuple[str, str, dict[str, str], bytes]] = {}
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """What sends a program's requests here, without a login and without Google's machines."""
        return {**dict.fromkeys(HOSTS, self.url), **self.SETTINGS}

    def put(self, bucket: str, name: str, content: bytes, *, composed: bool = False) -> None:
        """Makes or replaces an object, and its bucket."""
        with self.lock:
            objects = self.buckets.setdefault(bucket, {})
            objects[name] = Object(content, next(self.generations), composed)

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The names of a bucket's objects, sorted."""
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        """An object's content."""
        with self.lock:
            return self.buckets[bucket][name].content

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def serving() -> Iterator[GcsStandIn]:
    """A stand-in that this process's clients talk to; once a process: they remember where it is."""
    before = {name: os.environ.get(name) for name in (*HOSTS, *GcsStandIn.SETTINGS)}
    server = GcsStandIn()
    os.environ.update(server.environment())
    try:
        yield server
    finally:
        server.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Server(ThreadingHTTPServer):
    """Says nothing of clients that no longer wait for an answer."""

    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection; what it does is named after the API's methods."""

    protocol_version = "HTTP/1.1"
    store: GcsStandIn

    def log_message(self, *_) -> None:
        """Says nothing."""

    def handle_any(self) -> None:
        """Answers one request."""
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.body = self._read_body()
        path = re.sub("^/(upload|download|resumable)(?=/storage/v1)", "", address.path)
        parts = path.removeprefix("/storage/v1").strip("/").split("/")
        parts = [unquote(part) for part in parts]
        bucket = parts[1] if len(parts) > 1 else ""
        name = parts[3] if len(parts) > 3 else self.query.get("name", "")
        if self.query.get("uploadType") != "multipart":  # the name is in its body
            self.store.requests.append((self.command, bucket, name))
        status = self.store.refuse(self.command, bucket, name)
        if status is not None:
            self._error(status)
        elif bucket not in self.store.buckets:
            self._error(404)
        elif address.path.startswith("/upload"):
            self._upload(bucket, name)
        elif len(parts) == 2:
            self._json({"kind": "storage#bucket", "name": bucket})
        elif len(parts) == 3:
            self._list(bucket)
        elif len(parts) > 4:
            self._copy(bucket, name, parts[4:])
        elif self.command == "DELETE":
            self._delete(bucket, name)
        else:
            self._get(bucket, name)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    # -- the API's methods -------------------------------------------------------------------------

    def _list(self, bucket: str) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        first, most = self.query.get("pageToken", ""), int(self.query.get("maxResults", 1000))
        rows: dict[str, dict | None] = {}
        with self.store.lock:
            for name, found in sorted(self.store.buckets[bucket].items()):
                if not name.startswith(prefix) or name < self.query.get("startOffset", ""):
                    continue
                if "endOffset" in self.query and name >= self.query["endOffset"]:
                    continue
                head, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
                if delimiter and cut:
                    rows[prefix + head + delimiter] = None
                else:
                    rows[name] = _resource(bucket, name, found)
        names = [name for name in rows if name > first]
        page = {
            "kind": "storage#objects",
            "items": [rows[name] for name in names[:most] if rows[name] is not None],
            "prefixes": [name for name in names[:most] if rows[name] is None],
        }
        if len(names) > most:
            page["nextPageToken"] = names[most - 1]
        self._json(page)

    def _get(self, bucket: str, name: str) -> None:
        with self.store.lock:
            found = self.store.buckets[bucket].get(name)
        if found is None:
            return self._error(404)
        if self.query.get("ifGenerationNotMatch") == str(found.generation):
            return self._error(304)
        if self._is_another(found):
            return self._error(412)
        if self.query.get("alt") != "media":
            return self._json(_resource(bucket, name, found))
        content, status, headers = found.content, 200, {}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is not None:
            first, last = asked.groups()
            begin = int(first) if first else max(0, len(content) - int(last))
            end = int(last) + 1 if first and last else len(content)
            if begin >= len(content):
                return self._error(416)
            headers["Content-Range"] = f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}"
            content, status = content[begin:end], 206
        headers["x-goog-generation"] = str(found.generation)
        headers["x-goog-stored-content-length"] = str(len(found.content))
        return self._answer(status, content, "application/octet-stream", headers)

    def _upload(self, bucket: str, name: str) -> None:
        kind = self.query.get("uploadType")
        if kind == "resumable":
            return self._upload_in_pieces(bucket, name)
        content = self.body
        if kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            boundary = re.search('boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            assert BytesParser().parsebytes(head + self.body).is_multipart()
            # By hand, because content is not text with lines.
            about, content = self.body.split(b"--" + boundary)[1:3]
            name = json.loads(about.partition(b"\n\n")[2])["name"]
            content = content.partition(b"\n\n")[2].removesuffix(b"\n")
            self.store.requests.append((self.command, bucket, name))
            status = self.store.refuse(self.command, bucket, name)
            if status is not None:
                return self._error(status)
        return self._put(bucket, name, content)

    def _upload_in_pieces(self, bucket: str, name: str) -> None:
        upload = self.query.get("upload_id")
        if upload is None:
            upload = str(next(self.store.generations))
            self.store.uploads[upload] = bucket, name, self.query, b""
            where = f"{self.store.url}/upload/storage/v1/b/{bucket}/o"
            headers = {"Location": f"{where}?uploadType=resumable&upload_id={upload}"}
            return self._answer(200, b"", "text/plain", headers)
        bucket, name, self.query, content = self.store.uploads[upload]
        content += self.body
        self.store.uploads[upload] = bucket, name, self.query, content
        if self.headers["Content-Range"].endswith("/*"):
            return self._answer(308, b"", "text/plain", {"Range": f"bytes=0-{len(content) - 1}"})
        return self._put(bucket, name, content)

    def _put(self, bucket: str, name: str, content: bytes) -> None:
        with self.store.lock:
            objects = self.store.buckets[bucket]
            if self._is_another(objects.get(name)):
                return self._error(412)
            objects[name] = found = Object(content, next(self.store.generations))
        return self._json(_resource(bucket, name, found))

    def _delete(self, bucket: str, name: str) -> None:
        with self.store.lock:
            objects = self.store.buckets[bucket]
            if self._is_another(objects.get(name)):
                return self._error(412)
            if objects.pop(name, None) is None:
                return self._error(404)
        return self._answer(204, b"", "text/plain")

    def _copy(self, bucket: str, name: str, where: list[str]) -> None:
        # rewriteTo/b/BUCKET/o/NAME
        assert where[0] == "rewriteTo", where
        with self.store.lock:
            found = self.store.buckets[bucket].get(name)
            if found is None:
                return self._error(404)
            other = Object(found.content, next(self.store.generations))
            self.store.buckets[where[2]][where[4]] = other
        return self._json({"done": True, "resource": _resource(where[2], where[4], other)})

    # -- HTTP --------------------------------------------------------------------------------------

    def _is_another(self, found: Object | None) -> bool:
        wanted = self.query.get("ifGenerationMatch")
        return wanted is not None and int(wanted) != (found.generation if found else 0)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _error(self, status: int) -> None:
        words = {403: "you may not do that", 404: "there is no such thing"}
        error = {"error": {"code": status, "message": words.get(status, "no")}}
        self._answer(status, b"" if status == 304 else json.dumps(error).encode())

    def _json(self, value: dict) -> None:
        self._answer(200, json.dumps(value).encode())

    def _answer(
        self,
        status: int,
        content: bytes,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _resource(bucket: str, name: str, found: Object) -> dict:
    time = "2026-01-01T00:00:00.000Z"
    md5 = base64.b64encode(hashlib.md5(found.content).digest()).decode()
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.content)),
        "generation": str(found.generation),
        "metageneration": "1",
        **({} if found.composed else {"md5Hash": md5}),
        "timeCreated": time,
        "updated": time,
    }
