"""A virtual machine's metadata server, as Google Cloud has it, on loopback."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping

ATTRIBUTES = "instance/attributes/"


@contextlib.contextmanager
def metadata_server(
    answers: Mapping[str, str],
    *,
    below: str = "",
    asked: list[tuple[str, str | None]] | None = None,
) -> Iterator[str]:
    """Serves answers that may be changed meanwhile; yields HOST:PORT.

    Nothing is known to whoever does not say `Metadata-Flavor: Google`.

    Args:
      answers: by path below /computeMetadata/v1/ and `below`.
      below: what all these paths begin with.
      asked: takes each path that was asked for, as in `answers`, and the flavor that was said.
    """
    start = f"/computeMetadata/v1/{below}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, flavor = self.path.removeprefix(start), self.headers["Metadata-Flavor"]
            if asked is not None:
                asked.append((name, flavor))
            known = self.path.startswith(start) and name in answers and flavor == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers[name].encode() if known else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
