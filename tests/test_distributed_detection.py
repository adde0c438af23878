"""Which run a process belongs to, by each launcher's own variables."""

import pytest
from cluster import free_ports
from metadata_server import ATTRIBUTES, metadata_server

from jaxtrain.config.errors import UserError
from jaxtrain.run.cluster.cluster import Cluster, Flags
from jaxtrain.run.cluster.detection import detect, expand_nodes

# -- by hand ---------------------------------------------------------------------------------------


def test_nothing_said_is_one_process(tmp_path):
    assert detect({"PATH": "/bin", "HOSTNAME": "laptop"}, root=tmp_path) == Cluster()
    assert detect({}, Flags(), root=tmp_path).coordinator is None


def test_flags_come_first():
    flags = Flags(coordinator="node1:8476", num_processes=4, process_id=2)
    found = detect({"SLURM_JOB_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, flags)
    assert (found.kind, found.coordinator) == ("flags", "node1:8476")
    assert (found.num_processes, found.process_id) == (4, 2)
    assert found.found == "flags: process 2 of 4, coordinator node1:8476"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (Flags(coordinator="node1:8476"), "--num-processes and --process-id are missing"),
        (Flags(num_processes=2, process_id=0), "--coordinator is missing"),
        (Flags(coordinator="node1", num_processes=2, process_id=0), "write HOST:PORT"),
        (Flags(coordinator="node1:0", num_processes=2, process_id=0), "port from 1 to 65535"),
        (Flags(coordinator="node1:1", num_processes=2, process_id=2), "ids go from 0 to 1"),
        (Flags(coordinator="node1:1", num_processes=0, process_id=0), "there is at least 1"),
    ],
)
def test_flags_that_do_not_make_a_run_are_refused(flags, wanted):
    with pytest.raises(UserError, match=wanted):
        detect({}, flags)


def test_variables_by_hand():
    environment = {
        "JAX_COORDINATOR_ADDRESS": "[fe80::1]:9000",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "1",
    }
    found = detect(environment)
    assert (found.kind, found.coordinator) == ("environment", "[fe80::1]:9000")
    assert (found.num_processes, found.process_id) == (3, 1)
    del environment["JAX_PROCESS_ID"]
    with pytest.raises(UserError, match="JAX_PROCESS_ID"):
        detect(environment)
    with pytest.raises(UserError, match="needs JAX_COORDINATOR_ADDRESS"):
        detect({"JAX_NUM_PROCESSES": "3"})


# -- Kubernetes and TPUs ---------------------------------------------------------------------------

GKE = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}


def test_a_slice_on_gke():
    found = detect(GKE)
    assert (found.kind, found.coordinator) == ("GKE TPU", "t-0.svc:8482")
    assert (found.num_processes, found.process_id) == (2, 1)
    assert found.hosts == {0: "t-0.svc", 1: "t-1.svc"}
    assert found.local_device_ids is None
    assert detect({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}).num_processes == 1


def test_several_slices_on_gke_count_through():
    environment = GKE | {
        "MEGASCALE_COORDINATOR_ADDRESS": "s0-t-0.svc:8080",
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
    }
    found = detect(environment)
    assert (found.num_processes, found.process_id) == (6, 5)
    assert found.coordinator == "s0-t-0.svc:8482"
    assert found.hosts == {0: "s0-t-0.svc", 4: "t-0.svc", 5: "t-1.svc"}
    assert "slice 2 of 3" in found.found


def test_a_worker_without_a_number_is_refused():
    with pytest.raises(UserError, match="TPU_WORKER_ID=None"):
        detect({"TPU_WORKER_HOSTNAMES": "a,b"})
    with pytest.raises(UserError, match="worker 2 of a slice of 2"):
        detect(GKE | {"TPU_WORKER_ID": "2"})


def test_a_jobset_of_one_job():
    environment = {
        "JOB_COMPLETION_INDEX": "3",
        "JOBSET_NAME": "llama",
        "REPLICATED_JOB_NAME": "gpu",
        "JAX_NUM_PROCESSES": "4",
    }
    found = detect(environment)
    assert (found.kind, found.coordinator) == ("Kubernetes", "llama-gpu-0-0.llama:8482")
    assert (found.num_processes, found.process_id) == (4, 3)
    assert found.hosts[3] == "llama-gpu-0-3.llama"
    given = detect(environment | {"JAX_COORDINATOR_ADDRESS": "head:1234"})
    assert given.coordinator == "head:1234"


def test_pods_whose_number_or_head_is_not_said():
    # Pods of an indexed Job may each be a run of their own.
    assert detect({"JOB_COMPLETION_INDEX": "3"}).num_processes == 1
    with pytest.raises(UserError, match="set JAX_NUM_PROCESSES"):
        detect({"JOB_COMPLETION_INDEX": "3", "JOBSET_NAME": "llama"})
    with pytest.raises(UserError, match="which pod is the first"):
        detect({"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "4"})
    several = {"JOB_COMPLETION_INDEX": "0", "JAX_NUM_PROCESSES": "4", "JOB_INDEX": "1"}
    several |= {"JOBSET_NAME": "llama", "REPLICATED_JOB_NAME": "gpu"}
    with pytest.raises(UserError, match="set JAX_PROCESS_ID"):
        detect(several)
    assert detect(several | {"JAX_PROCESS_ID": "2"}).process_id == 2


@pytest.fixture
def metadata():
    """A metadata server on loopback: its address, and the attributes it answers with."""
    attributes, asked = {}, []
    with metadata_server(attributes, below=ATTRIBUTES, asked=asked) as address:
        yield address, attributes, asked


@pytest.mark.parametrize("endpoints", ["10.0.0.7,10.0.0.8", "a:1:10.0.0.7,b:2:10.0.0.8"])
def test_a_tpu_vm_asks_its_metadata_server(metadata, endpoints):
    address, attributes, asked = metadata
    attributes |= {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    found = detect({"GCE_METADATA_HOST": address})
    assert (found.kind, found.coordinator) == ("TPU VM", "10.0.0.7:8482")
    assert (found.num_processes, found.process_id) == (2, 1)
    assert found.hosts == {0: "10.0.0.7", 1: "10.0.0.8"}
    assert {flavor for _, flavor in asked} == {"Google"}


def test_joined_slices_of_tpu_vms_stand_in_the_metadata(metadata):
    address, attributes, _ = metadata
    attributes |= {"worker-network-endpoints": "10.0.1.1,10.0.1.2", "agent-worker-number": "0"}
    attributes["tpu-env"] = (
        "ACCELERATOR_TYPE: 'v5litepod-8'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n"
        "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    )
    found = detect({"GCE_METADATA_HOST": address})
    assert (found.num_processes, found.process_id) == (4, 2)
    assert found.coordinator == "10.0.0.1:8482"


def test_other_machines_of_that_cloud_are_alone(metadata):
    address, _, asked = metadata
    assert detect({"GCE_METADATA_HOST": address}) == Cluster()
    assert asked


def test_a_metadata_server_that_does_not_answer_is_said():
    found = detect({"GCE_METADATA_HOST": f"127.0.0.1:{free_ports()}"})
    assert found.num_processes == 1
    assert "does not answer" in found.found
    assert "refused" in found.found


def test_only_a_machine_with_chips_asks(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "jaxtrain.run.cluster.detection._ask", lambda host, name: asked.append(host)
    )
    detect({}, root=tmp_path)
    assert asked == []
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    (tmp_path / "dev" / "vfio" / "vfio").touch()
    detect({}, root=tmp_path)
    assert asked == []
    (tmp_path / "dev" / "vfio" / "0").touch()
    detect({"TPU_SKIP_MDS_QUERY": "1"}, root=tmp_path)
    assert asked == []
    detect({}, root=tmp_path)
    assert set(asked) == {"metadata.google.internal"}


# -- MPI -------------------------------------------------------------------------------------------

MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("variable", "value", "host"),
    [
        ("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1"),
        ("OMPI_MCA_orte_hnp_uri", "1314521088.0;tcp6://[fe80::b9b,2620::2]:43370", "[fe80::b9b]"),
        ("PMIX_NAMESPACE", "prterun-gpu-node1-40417@1", "gpu-node1"),
    ],
)
def test_open_mpi(variable, value, host):
    found = detect(MPI | {variable: value})
    assert (found.kind, found.num_processes, found.process_id) == ("Open MPI", 4, 3)
    assert found.coordinator.rpartition(":")[0] == host
    assert found.local_device_ids == (1,)
    # mpirun in a Slurm allocation: the step is that of its daemons.
    assert detect(MPI | {variable: value} | SLURM) == found


def test_mpi_whose_first_machine_is_not_known_asks_for_it():
    with pytest.raises(UserError, match=r"--coordinator HOST:PORT --num-processes 4"):
        detect(MPI)
    assert detect(MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}).coordinator == "a:1"
    on_one = detect(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert on_one.coordinator.startswith("127.0.0.1:")


def test_mpich():
    environment = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
    found = detect(environment)
    assert (found.kind, found.num_processes, found.process_id) == ("MPICH", 2, 1)
    assert found.coordinator.startswith("127.0.0.1:")
    assert found.local_device_ids == (1,)
    with pytest.raises(UserError, match=r"MPICH: 2 processes, .*\$PMI_RANK"):
        detect(environment | {"MPI_LOCALNRANKS": "1"})


# -- Slurm -----------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "4095",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}


def test_slurm_with_a_task_a_node():
    found = detect(SLURM)
    assert (found.kind, found.num_processes, found.process_id) == ("Slurm", 4, 2)
    assert found.hosts == {0: "gpu07", 1: "gpu08", 2: "gpu09", 3: "gpu12"}
    host, _, port = found.coordinator.partition(":")
    assert host == "gpu07"
    assert 1024 < int(port) < 65535
    assert found.local_device_ids is None
    assert found.found == f"Slurm: process 2 of 4, coordinator {found.coordinator}"
    assert detect(SLURM | {"JAX_COORDINATOR_PORT": "9999"}).coordinator == "gpu07:9999"
    # Jobs that share a node do not share a port, nor the one above it that JAX takes.
    other = detect(SLURM | {"SLURM_JOB_ID": "4096"}).coordinator
    assert abs(int(other.partition(":")[2]) - int(port)) >= 2


def test_slurm_with_a_task_an_accelerator():
    environment = SLURM | {
        "SLURM_STEP_NODELIST": "gpu1,gpu2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    }
    found = detect(environment)
    assert found.local_device_ids == (1,)
    assert found.hosts == {0: "gpu1", 1: "gpu1", 2: "gpu2", 3: "gpu2"}
    # --gpus-per-task: each task sees its own as number 0.
    assert detect(environment | {"CUDA_VISIBLE_DEVICES": "1"}).local_device_ids is None
    assert detect(environment | {"CUDA_VISIBLE_DEVICES": "0,1"}).local_device_ids == (1,)
    assert detect(environment | {"SLURM_DISTRIBUTION": "cyclic"}).hosts == {}


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "4095", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[1-4]"},
        SLURM | {"SLURM_NTASKS": "1"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["a batch script", "one task", "a shell in an allocation"],
)
def test_slurm_without_a_step_of_several_tasks_is_one_process(environment, tmp_path):
    assert detect(environment, root=tmp_path).num_processes == 1


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node001", ["node001"]),
        ("node001,host2", ["node001", "host2"]),
        ("node[009-011],host2", ["node009", "node010", "node011", "host2"]),
        ("node[001,007-008]", ["node001", "node007", "node008"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
    ],
)
def test_node_lists(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "node[1-x]"])
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(UserError, match="not a list of nodes"):
        expand_nodes(text)
