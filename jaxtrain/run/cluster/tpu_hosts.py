"""Hosts of a TPU slice: GKE variables or the metadata server of a TPU VM."""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.devices import has_tpu_chips
from jaxtrain.run.cluster.cluster import Cluster, LaunchedBy
from jaxtrain.run.cluster.launchers import DEFAULT_PORT, address, integer, sentence

_METADATA_SECONDS = 2.0


def gke_tpu(environment: Mapping[str, str]) -> Cluster | None:
    """TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, with MEGASCALE_* where slices are joined.

    Raises:
      UserError: one of them is missing or no number.
    """
    names = environment.get("TPU_WORKER_HOSTNAMES", "")
    if not names:
        return None
    worker = integer(environment, "TPU_WORKER_ID")
    return _slices("GKE TPU", environment, names.split(","), worker, environment)


def tpu_vm(environment: Mapping[str, str], root: Path = Path("/")) -> Cluster | None:
    """The workers that the metadata server of a Cloud TPU VM names.

    Asked only on what looks like a TPU VM: chips as device files, or GCE_METADATA_HOST set. The
    attributes are `worker-network-endpoints` (host names, or old `name:id:address` triples),
    `agent-worker-number` and, for joined slices, `tpu-env`.
    """
    host = environment.get("GCE_METADATA_HOST", "metadata.google.internal")
    if "GCE_METADATA_HOST" not in environment and (
        "TPU_SKIP_MDS_QUERY" in environment or not has_tpu_chips(root)
    ):
        return None
    try:
        endpoints, number = (
            _ask(host, name) for name in ("worker-network-endpoints", "agent-worker-number")
        )
        if endpoints is None or number is None:
            return None
        told = _read_tpu_env(_ask(host, "tpu-env") or "")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Cluster(found=f"One process: the metadata server {host} does not answer ({reason})")
    workers = [_worker_address(entry) for entry in endpoints.split(",")]
    return _slices("TPU VM", environment, workers, int(number), {**told, **environment})


def _slices(
    kind: LaunchedBy,
    environment: Mapping[str, str],
    workers: list[str],
    worker: int,
    megascale: Mapping[str, str],
) -> Cluster:
    """Processes count through the slices; the first of the first slice is the coordinator."""
    slices, own = 1, 0
    first = workers[0]
    if megascale.get("MEGASCALE_COORDINATOR_ADDRESS"):
        first = re.sub(r":\d+$", "", megascale["MEGASCALE_COORDINATOR_ADDRESS"])
        slices = integer(megascale, "MEGASCALE_NUM_SLICES")
        own = integer(megascale, "MEGASCALE_SLICE_ID")
    count, process = slices * len(workers), own * len(workers) + worker
    if worker >= len(workers):
        raise UserError(
            f"{kind}: worker {worker} of a slice of {len(workers)} ({', '.join(workers)}); ids go "
            f"from 0 to {len(workers) - 1}"
        )
    if count == 1:
        return Cluster(kind=kind, found=f"{kind}: one process")
    coordinator = address(environment, first, DEFAULT_PORT)
    hosts = {0: first}
    hosts |= {own * len(workers) + place: name for place, name in enumerate(workers)}
    more = f", slice {own} of {slices}" if slices > 1 else ""
    return Cluster(
        kind=kind,
        coordinator=coordinator,
        num_processes=count,
        process_id=process,
        hosts=hosts,
        found=sentence(kind, process, count, coordinator, more),
    )


def _ask(host: str, name: str) -> str | None:
    """An attribute of this virtual machine; None: it has none of this name."""
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # The server is on the machine's own link: a proxy could not reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _worker_address(entry: str) -> str:
    parts = entry.split(":")
    if len(parts) not in (1, 3):
        raise UserError(
            f"worker-network-endpoints: {entry!r} is neither a host nor name:id:address"
        )
    return parts[-1]


def _read_tpu_env(text: str) -> dict[str, str]:
    """Lines such as `MEGASCALE_NUM_SLICES: '2'`."""
    found = re.findall(r"^\s*(\w+)\s*:\s*'?([^'\n]*?)'?\s*$", text, re.MULTILINE)
    return dict(found)
