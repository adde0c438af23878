"""Cluster detection: environment variables of launchers (Slurm, MPI, Kubernetes) and TPU metadata.

The order is fixed: flags, GKE and Kubernetes, TPU VMs, Open MPI, MPICH, Slurm.
"""

import http.client
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.config.errors import UserError
from jaxtrain.parallel.devices import has_tpu_chips
from jaxtrain.run.cluster.cluster import Cluster, Flags, LaunchedBy, join_address, split_address

Environment = Mapping[str, str]

# The first port of JAX's own range, above the usual range of ephemeral ports.
_FIRST_PORT = 61440
_PORT_PAIRS = 2047
# JAX's port on TPUs, which their firewall rules allow.
DEFAULT_PORT = 8482


def integer(environment: Environment, name: str) -> int:
    """Return an environment variable as an integer.

    Raises:
      UserError: the variable is not set or not an integer.
    """
    text = environment.get(name)
    if text is None or not text.strip().isdigit():
        raise UserError(f"environment variable {name}={text!r}: it must be an integer")
    return int(text)


def address(environment: Environment, host: str, port: int) -> str:
    """Return the coordinator's address; JAX_COORDINATOR_ADDRESS or _PORT takes precedence."""
    address_text = environment.get("JAX_COORDINATOR_ADDRESS")
    if address_text:
        split_address(address_text)
        return address_text
    if environment.get("JAX_COORDINATOR_PORT"):
        port = integer(environment, "JAX_COORDINATOR_PORT")
    return join_address(host, port)


def sentence(kind: str, cluster_process: int, count: int, coordinator: str, more: str = "") -> str:
    """Return `Slurm: process 2 of 4, coordinator node1:8476`; process ids start at 0."""
    return f"{kind}: process {cluster_process} of {count}, coordinator {coordinator}{more}"


def _make(
    kind: LaunchedBy,
    coordinator: str,
    count: int,
    process: int,
    *,
    local: tuple[int, ...] | None = None,
    hosts: Mapping[int, str] | None = None,
) -> Cluster:
    if count == 1:
        return Cluster(kind=kind, found=f"{kind}: one process")
    more = "" if local is None else f", accelerator {', '.join(map(str, local))} of this machine"
    return Cluster(
        kind=kind,
        coordinator=coordinator,
        num_processes=count,
        process_id=process,
        local_device_ids=local,
        hosts=hosts or {},
        found=sentence(kind, process, count, coordinator, more),
    )


# -- flags -----------------------------------------------------------------------------------------


def cluster_from_flags(environment: Environment, flags: Flags) -> Cluster | None:
    """Return the cluster of the three flags, or of the variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
      UserError: some of the flags are missing, or variables that JAX_NUM_PROCESSES requires.
    """
    given = {
        "--coordinator": flags.coordinator,
        "--num-processes": flags.num_processes,
        "--process-id": flags.process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) < len(given):
        if missing:
            there = ", ".join(f"{n} {v}" for n, v in given.items() if v is not None)
            raise UserError(
                f"{there}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; "
                "give all three (--coordinator HOST:PORT --num-processes N --process-id K) or none"
            )
        assert flags.coordinator is not None
        assert flags.num_processes is not None
        assert flags.process_id is not None
        split_address(flags.coordinator)
        # Validate the flags also for a single process, whose Cluster ignores the id.
        Cluster(
            kind="flags",
            coordinator=flags.coordinator,
            num_processes=flags.num_processes,
            process_id=flags.process_id,
        )
        return _make("flags", flags.coordinator, flags.num_processes, flags.process_id)
    if "JAX_NUM_PROCESSES" not in environment or "JOB_COMPLETION_INDEX" in environment:
        return None
    count = integer(environment, "JAX_NUM_PROCESSES")
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if count > 1 and coordinator is None:
        raise UserError(
            f"JAX_NUM_PROCESSES={count} needs JAX_COORDINATOR_ADDRESS=HOST:PORT and JAX_PROCESS_ID"
        )
    process = integer(environment, "JAX_PROCESS_ID") if count > 1 else 0
    return _make("environment", coordinator or "", count, process)


# -- Kubernetes ------------------------------------------------------------------------------------


def kubernetes(environment: Environment) -> Cluster | None:
    """Detect an indexed Job or a JobSet with one job, by JOB_COMPLETION_INDEX in its pods.

    Kubernetes sets no variable for the number of pods; JAX_NUM_PROCESSES is required. The address
    of the first pod is JAX_COORDINATOR_ADDRESS, or follows from JOBSET_NAME and
    REPLICATED_JOB_NAME, which manifests set from the pod's labels
    jobset.sigs.k8s.io/jobset-name and /replicatedjob-name.

    Raises:
      UserError: these variables are set, but the number of pods or the first pod is missing.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    index = integer(environment, "JOB_COMPLETION_INDEX")
    jobset, job = environment.get("JOBSET_NAME"), environment.get("REPLICATED_JOB_NAME")
    named = "JAX_COORDINATOR_ADDRESS" in environment or jobset is not None
    if "JAX_NUM_PROCESSES" not in environment:
        if not named:
            # Without these variables, the pods of an indexed Job may be independent runs.
            return None
        raise UserError(
            "Kubernetes: JOB_COMPLETION_INDEX is set but not the number of pods; set "
            "JAX_NUM_PROCESSES to the Job's completions in the manifest"
        )
    count = integer(environment, "JAX_NUM_PROCESSES")
    process = index
    if environment.get("JAX_PROCESS_ID"):
        process = integer(environment, "JAX_PROCESS_ID")
    elif environment.get("JOB_INDEX", "0") != "0":
        raise UserError(
            f"Kubernetes: JOB_INDEX={environment['JOB_INDEX']}: a JobSet of several jobs numbers "
            "its pods in each; set JAX_PROCESS_ID from the label "
            "jobset.sigs.k8s.io/job-global-index, or use one job with more completions"
        )
    hosts = {}
    if jobset and job:
        hosts = {pod: f"{jobset}-{job}-0-{pod}.{jobset}" for pod in range(count)}
    elif count > 1 and "JAX_COORDINATOR_ADDRESS" not in environment:
        raise UserError(
            "Kubernetes: which pod is the first is not known; set JAX_COORDINATOR_ADDRESS=HOST:PORT"
            ", or JOBSET_NAME and REPLICATED_JOB_NAME from the pod's labels"
        )
    coordinator = address(environment, hosts.get(0, ""), DEFAULT_PORT)
    return _make("Kubernetes", coordinator, count, process, hosts=hosts)


# -- MPI -------------------------------------------------------------------------------------------


def open_mpi(environment: Environment) -> Cluster | None:
    """Detect processes of Open MPI's mpirun; assume that process 0 is on the host of mpirun.

    That host is in OMPI_MCA_orte_hnp_uri (Open MPI 4: `ID;tcp://10.0.0.1,...:PORT`) or in
    PMIX_NAMESPACE (Open MPI 5: `prterun-HOST-PID@1`).

    Raises:
      UserError: neither variable contains the host.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    count = integer(environment, "OMPI_COMM_WORLD_SIZE")
    process = integer(environment, "OMPI_COMM_WORLD_RANK")
    on_host = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    uri = re.match(
        r"(\d+)\.\d+;tcp6?://(?:\[([^\],]+)|([^,:]+))",
        environment.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    namespace = re.fullmatch(r"[a-z]+-(.+)-(\d+)@\d+", environment.get("PMIX_NAMESPACE", ""))
    if count == on_host:
        host = "127.0.0.1"
    elif uri is not None:
        host = uri[2] or uri[3]
    elif namespace is not None:
        host = namespace[1]
    else:
        host = ""
    if uri is not None:
        job = int(uri[1]) >> 12
    else:
        job = int(namespace[2]) if namespace is not None else 0
    local = _own_accelerator(environment, "OMPI_COMM_WORLD_LOCAL_RANK", on_host)
    coordinator = _mpi_coordinator(environment, "Open MPI", host, job, count)
    return _make("Open MPI", coordinator, count, process, local=local)


def mpich(environment: Environment) -> Cluster | None:
    """Detect processes of MPICH's or Intel's mpiexec.

    If MPI_LOCALNRANKS is not set within Slurm, the variables come from Slurm's own PMI, and srun
    started the processes.

    Raises:
      UserError: there are several machines, and no variable has the host of process 0.
    """
    if "PMI_SIZE" not in environment or "PMI_RANK" not in environment:
        return None
    if "MPI_LOCALNRANKS" not in environment and "SLURM_PROCID" in environment:
        return None
    count, process = integer(environment, "PMI_SIZE"), integer(environment, "PMI_RANK")
    on_host = int(environment.get("MPI_LOCALNRANKS", "1"))
    local = _own_accelerator(environment, "MPI_LOCALRANKID", on_host)
    host = "127.0.0.1" if count == on_host else ""
    coordinator = _mpi_coordinator(environment, "MPICH", host, 0, count)
    return _make("MPICH", coordinator, count, process, local=local)


def _mpi_coordinator(environment: Environment, kind: str, host: str, job: int, count: int) -> str:
    if count > 1 and not host and not environment.get("JAX_COORDINATOR_ADDRESS"):
        rank = "OMPI_COMM_WORLD_RANK" if kind == "Open MPI" else "PMI_RANK"
        raise UserError(
            f"{kind}: {count} processes, but the machine of process 0 is not known; pass "
            f"--coordinator HOST:PORT --num-processes {count} --process-id ${rank}, or set "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT"
        )
    return address(environment, host, _port(job))


def _port(job: int) -> int:
    """Return a port that differs between jobs on one machine; the next port is JAX's."""
    return _FIRST_PORT + 2 * (job % _PORT_PAIRS)


def _own_accelerator(environment: Environment, name: str, on_host: int) -> tuple[int, ...] | None:
    """Return the accelerator of a process that shares its machine; None for all visible ones."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES"))
    # The launcher already assigned each process its own accelerator, visible as number 0.
    bound = visible is not None and "," not in visible
    if on_host < 2 or bound or name not in environment:
        return None
    return (integer(environment, name),)


# -- Slurm -----------------------------------------------------------------------------------------


def slurm(environment: Environment) -> Cluster | None:
    """Detect the tasks of an srun step; a shell or batch script in an allocation does not count.

    A single task per node uses all accelerators of the node; otherwise each task uses its own.
    """
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if any(name not in environment for name in names):
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    count = integer(environment, tasks)
    if count == 1:
        return _make("Slurm", "", 1, 0)
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    process = integer(environment, "SLURM_PROCID")
    per_node = _tasks_per_node(environment, len(nodes), count)
    local = _own_accelerator(environment, "SLURM_LOCALID", max(per_node, default=2))
    hosts = {}
    spread = environment.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0]
    if set(per_node) == {1} or (per_node and spread == "block"):
        filled = [node for node, tasks in zip(nodes, per_node, strict=True) for _ in range(tasks)]
        hosts = dict(enumerate(filled))
    # Steps of one job may run concurrently.
    number = integer(environment, "SLURM_JOB_ID") + int(environment.get("SLURM_STEP_ID", "0"))
    coordinator = address(environment, nodes[0], _port(number))
    return _make("Slurm", coordinator, count, process, local=local, hosts=hosts)


def _tasks_per_node(environment: Environment, nodes: int, count: int) -> list[int]:
    """Return the number of tasks of each node, from text like `2(x3),1`; empty if unknown."""
    if nodes == count:
        return [1] * nodes
    tasks = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks if len(tasks) == nodes and sum(tasks) == count else []


def expand_nodes(text: str) -> list[str]:
    """Expand a Slurm node list: `gpu[01-03,7],login` to `gpu01 gpu02 gpu03 gpu7 login`.

    A name may have several brackets.

    Raises:
      UserError: the text is not a node list.
    """
    nodes = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            pieces = [plain] if plain else list(_expand_ranges(ranges, text))
            found = [start + piece for start in found for piece in pieces]
        nodes += found
    if not nodes:
        raise UserError(f"SLURM_STEP_NODELIST={shlex.quote(text)} is not a list of nodes")
    return nodes


def _expand_ranges(ranges: str, text: str) -> list[str]:
    pieces = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            raise UserError(f"SLURM_STEP_NODELIST={shlex.quote(text)} is not a list of nodes")
        first, last = match[1], match[2] or match[1]
        pieces += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return pieces


_METADATA_SECONDS = 2.0


def gke_tpu(environment: Mapping[str, str]) -> Cluster | None:
    """Detect TPUs on GKE by TPU_WORKER_HOSTNAMES, TPU_WORKER_ID, and MEGASCALE_* for multislice.

    Raises:
      UserError: a variable is missing or not an integer.
    """
    names = environment.get("TPU_WORKER_HOSTNAMES", "")
    if not names:
        return None
    worker = integer(environment, "TPU_WORKER_ID")
    return _slices("GKE TPU", environment, names.split(","), worker, environment)


def tpu_vm(environment: Mapping[str, str], root: Path = Path("/")) -> Cluster | None:
    """Detect the workers of a Cloud TPU VM by its metadata server.

    The server is queried only if there are device files of TPU chips or GCE_METADATA_HOST is set.
    The attributes are `worker-network-endpoints` (host names, or old `name:id:address` triples),
    `agent-worker-number` and, for multislice, `tpu-env`.
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
        metadata = _read_tpu_env(_ask(host, "tpu-env") or "")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Cluster(found=f"One process: the metadata server {host} does not answer ({reason})")
    workers = [_worker_address(entry) for entry in endpoints.split(",")]
    return _slices("TPU VM", environment, workers, int(number), {**metadata, **environment})


def _slices(
    kind: LaunchedBy,
    environment: Mapping[str, str],
    workers: list[str],
    worker: int,
    megascale: Mapping[str, str],
) -> Cluster:
    """Return the cluster of all slices, with ids by slice; process 0 of slice 0 coordinates."""
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
    hosts |= {own * len(workers) + index: name for index, name in enumerate(workers)}
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
    """Return an attribute of this virtual machine from the metadata server; None if not set."""
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # The metadata server is link-local: a proxy cannot reach it.
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
    """Parse lines such as `MEGASCALE_NUM_SLICES: '2'` into a dict."""
    found = re.findall(r"^\s*(\w+)\s*:\s*'?([^'\n]*?)'?\s*$", text, re.MULTILINE)
    return dict(found)


def detect(
    environment: Mapping[str, str], flags: Flags | None = None, *, root: Path = Path("/")
) -> Cluster:
    """Detect the cluster that this process belongs to; a single process if there is none.

    The order is: flags; JAX_NUM_PROCESSES; the variables of TPUs on GKE; a Kubernetes job; the
    metadata server of a TPU VM; Open MPI and MPICH; Slurm. MPI comes before Slurm: within an
    allocation, processes of mpirun inherit the Slurm variables of mpirun's daemons, while srun sets
    no variables of MPI.

    Args:
      environment: `os.environ`, or a mapping in tests.
      flags: the cluster options of the command line.
      root: the root folder of device files.

    Raises:
      UserError: the settings of a launcher are incomplete.
    """
    return (
        cluster_from_flags(environment, flags or Flags())
        or gke_tpu(environment)
        or kubernetes(environment)
        or tpu_vm(environment, root)
        or open_mpi(environment)
        or mpich(environment)
        or slurm(environment)
        or Cluster()
    )
