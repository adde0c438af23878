"""Google Cloud maintenance and preemption notices."""

import contextlib
import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

# What the metadata server says of a virtual machine (Google Cloud: "Maintenance notices",
# "Preemptible VM instances"), and the answers that announce its end.
NOTICES = {
    "instance/maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE"),
    "instance/preempted": ("TRUE",),
}
METADATA_HOST = "metadata.google.internal"
PERIOD_SECONDS = 10.0


def notice(host: str, timeout_seconds: float = 2.0) -> str | None:
    """What announces this machine's end, such as 'instance/preempted TRUE'; None: nothing does.

    A metadata server that does not answer announces nothing: SIGTERM still comes.
    """
    for path, alarms in NOTICES.items():
        request = urllib.request.Request(
            f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
                said = answer.read(256).decode("ascii", "replace").strip()
        except (OSError, http.client.HTTPException, urllib.error.URLError):
            continue
        if said in alarms:
            return f"{path} {said}"
    return None


@contextlib.contextmanager
def maintenance_notices(
    request_stop: Callable[[str], None],
    environment: Mapping[str, str],
    *,
    on_google_cloud: bool,
    period_seconds: float = PERIOD_SECONDS,
) -> Iterator[None]:
    """Polls the notices in a thread and calls `request_stop` once when one comes.

    Args:
      request_stop: called with what announces the end.
      environment: GCE_METADATA_HOST in it names another metadata server, as for Google's libraries.
      on_google_cloud: whether there is a metadata server to ask; False polls nothing.
      period_seconds: between two questions.
    """
    host = environment.get("GCE_METADATA_HOST")
    if host is None and not on_google_cloud:
        yield
        return
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(period_seconds):
            found = notice(host or METADATA_HOST)
            if found is not None:
                request_stop(found)
                return

    poller = threading.Thread(target=poll, name="maintenance notices", daemon=True)
    poller.start()
    try:
        yield
    finally:
        ended.set()
        poller.join()
