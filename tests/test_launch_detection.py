"""What slurm.sbatch, the JobSets and TPU VMs set in processes is what these detect."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, start_processes
from metadata_server import ATTRIBUTES, metadata_server

from jaxtrain.run.attempts import PREEMPTED, USER_ERROR
from jaxtrain.run.attempts.signals import record_signals
from jaxtrain.run.cluster.authentication import RunToken
from jaxtrain.run.commands import supervise

yaml = pytest.importorskip("yaml")

SCRIPTS = ROOT / "tpu_scripts"
PROGRAM = """
import dataclasses, json, os, sys
from jaxtrain.run.cluster.detection import detect
found = dataclasses.asdict(detect(os.environ))
sys.stdout.write("FOUND " + json.dumps(found) + "\\n")
"""


def detected(per_process: list[dict[str, str]], folder: Path) -> list[dict]:
    """What real processes with these variables find, in their order."""
    count, own = len(per_process), dict(enumerate(per_process))
    with start_processes(count, PROGRAM, folder=folder, per_process=own) as processes:
        lines = [process.wait_for("FOUND ") for process in processes]
        assert [process.end() for process in processes] == [0] * count
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


def check(found: list[dict], kind: str, coordinator: str) -> None:
    """They agree on their number and their coordinator, and each has its own id, in order."""
    assert [one["process_id"] for one in found] == list(range(len(found)))
    assert {one["num_processes"] for one in found} == {len(found)}
    assert {one["kind"] for one in found} == {kind}
    assert {one["coordinator"] for one in found} == {coordinator}


# -- GKE -------------------------------------------------------------------------------------------


def read_jobset(name: str) -> tuple[dict, dict, dict]:
    """A manifest's metadata, its one replicated job and the container of its pods."""
    jobset = yaml.safe_load((SCRIPTS / name).read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [job] = jobset["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return jobset, job, container


def pod_environments(name: str) -> list[dict[str, str]]:
    """What the manifest sets in each pod, and what Kubernetes and JobSet do for an indexed job."""
    jobset, job, container = read_jobset(name)
    spec, title = job["template"]["spec"], jobset["metadata"]["name"]
    labels = {
        "jobset.sigs.k8s.io/jobset-name": title,
        "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
    }
    pods = []
    for index in range(spec["completions"]):
        pod = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in container.get("env", []):
            if "value" in variable:
                pod[variable["name"]] = variable["value"]
            elif "secretKeyRef" in variable["valueFrom"]:
                assert variable["name"] == "JAXTRAIN_TOKEN"
                pod["JAXTRAIN_TOKEN"] = "of-the-secret-" + "3c" * 16
            else:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                pod[variable["name"]] = labels[re.fullmatch(r"metadata\.labels\['(.*)'\]", path)[1]]
        pods.append(pod)
    return pods


@pytest.mark.parametrize("name", ["gke_jobset.yaml", "gke_jobset_gpu.yaml"])
def test_a_jobset_takes_the_token_from_a_secret_that_its_head_says_how_to_make(name, tmp_path):
    pods = pod_environments(name)
    found = {RunToken(pod, tmp_path / "token").find() for pod in pods}
    assert len(found) == 1
    _, _, container = read_jobset(name)
    [variable] = [one for one in container["env"] if one["name"] == "JAXTRAIN_TOKEN"]
    secret = variable["valueFrom"]["secretKeyRef"]
    head = (SCRIPTS / name).read_text().partition("apiVersion")[0]
    assert f"create secret generic {secret['name']} --from-file={secret['key']}=" in head


@pytest.mark.parametrize("name", ["gke_jobset.yaml", "gke_jobset_gpu.yaml"])
def test_a_jobset_restarts_and_runs_what_supervise_takes(name):
    jobset, job, container = read_jobset(name)
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    # Any lost pod starts the whole set again; a user's error ends it.
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [USER_ERROR]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert container["command"] == ["jaxtrain", "supervise", "--"]
    request = supervise.parse(["--", *container["args"]])
    assert pod["terminationGracePeriodSeconds"] > request.settings.grace_seconds
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "runs"]
    assert request.workdir.is_relative_to(mount["mountPath"])
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [8482, 8483]  # detection's own, and the next one
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_a_tpu_slice_has_the_machines_that_its_topology_needs():
    _, job, container = read_jobset("gke_jobset.yaml")
    selector = job["template"]["spec"]["template"]["spec"]["nodeSelector"]
    rows, columns = map(int, selector["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert job["template"]["spec"]["completions"] * chips == rows * columns


# Starts processes, as a Slurm job in the fast part.
@pytest.mark.slow
def test_pods_of_a_tpu_slice(tmp_path):
    pods = pod_environments("gke_jobset.yaml")
    hosts = [f"jaxtrain-slice-0-{number}.jaxtrain" for number in range(len(pods))]
    for number, pod in enumerate(pods):  # by GKE's own webhook
        pod |= {"TPU_WORKER_ID": str(number), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
    check(detected(pods, tmp_path), "GKE TPU", f"{hosts[0]}:8482")


def test_pods_of_gpu_machines(tmp_path):
    found = detected(pod_environments("gke_jobset_gpu.yaml"), tmp_path)
    assert len(found) == read_jobset("gke_jobset_gpu.yaml")[1]["template"]["spec"]["completions"]
    check(found, "Kubernetes", "jaxtrain-gpu-0-0.jaxtrain:8482")
    # JobSet names a pod JOBSET-JOB-INDEX-POD in the subdomain JOBSET.
    assert found[0]["hosts"]["1"] == "jaxtrain-gpu-0-1.jaxtrain"


# -- TPU VMs ---------------------------------------------------------------------------------------


# Starts processes, as a Slurm job in the fast part.
@pytest.mark.slow
def test_workers_of_two_slices_of_tpu_vms(tmp_path):
    with contextlib.ExitStack() as servers:
        workers = []
        for number in range(4):
            own, worker = divmod(number, 2)
            address = servers.enter_context(
                metadata_server(
                    {
                        "worker-network-endpoints": f"10.0.{own}.2,10.0.{own}.3",
                        "agent-worker-number": str(worker),
                        "tpu-env": "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2:8080'\n"
                        f"MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '{own}'\n",
                    },
                    below=ATTRIBUTES,
                )
            )
            workers.append({"GCE_METADATA_HOST": address})
        check(detected(workers, tmp_path), "TPU VM", "10.0.0.2:8482")


# -- Slurm -----------------------------------------------------------------------------------------

# What srun does for a step: a task for each place, with Slurm's variables; the highest status.
SRUN = """
import os, subprocess, sys
nodes, each = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
command = sys.argv[1:]
options = [command.pop(0) for _ in list(command) if command[0].startswith("--")]
tasks = []
for number in range(nodes * each):
    step = {
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
        "SLURM_STEP_NUM_TASKS": str(nodes * each), "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number % each),
        "SLURM_NODEID": str(number // each), "CUDA_VISIBLE_DEVICES": "0,1",
    }
    with open(f"task.{number}.log", "w") as log:
        tasks.append(subprocess.Popen(command, env=os.environ | step, stdout=log))
open("srun", "w").write(" ".join(options))
sys.exit(max(task.wait() for task in tasks))
"""


def submit(
    folder: Path, jaxtrain: str, *words: str, others: dict[str, str] | None = None, **more: str
) -> subprocess.CompletedProcess:
    """Runs slurm.sbatch as sbatch does, with stand-ins for srun, scontrol and `jaxtrain`."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "srun.py").write_text(SRUN)
    for name, text in {
        "srun": f'exec {sys.executable} "{folder}/srun.py" "$@"',
        "scontrol": 'echo "$@" >scontrol.txt',
        "jaxtrain": jaxtrain,
        **(others or {}),
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    # Options of the command line, or else of the script's head, become variables of the job.
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", script_text(), re.M))
    job = {
        "SLURM_JOB_ID": "4095",
        "SLURM_NNODES": directives["nodes"],
        "SLURM_NTASKS_PER_NODE": directives["ntasks-per-node"],
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "JAX_", "OMPI_"))}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", SCRIPTS / "slurm.sbatch", *words],
        cwd=folder,
        env=kept | path | job | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def script_text() -> str:
    return (SCRIPTS / "slurm.sbatch").read_text()


TRAIN = ["train", "llama_1b", "--workdir", "/shared/runs/first", "-b", "Train.steps = 2"]


@pytest.mark.parametrize("each", [1, 2])
def test_tasks_of_a_slurm_job(tmp_path, each):
    more = {} if each == 1 else {"SLURM_NTASKS_PER_NODE": str(each)}
    (tmp_path / "bin").mkdir()
    program = f'exec {sys.executable} "{tmp_path}/bin/program.py"'
    done = submit(tmp_path / "bin", program, *TRAIN, **more)
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "bin" / f"task.{n}.log").read_text() for n in range(2 * each)]
    found = [json.loads(log.removeprefix("FOUND ")) for log in logs]
    assert found[0]["coordinator"].startswith("node1:")
    check(found, "Slurm", found[0]["coordinator"])
    # One a node takes all of its accelerators; of several each takes one.
    wanted = [None, None] if each == 1 else [[0], [1], [0], [1]]
    assert [one["local_device_ids"] for one in found] == wanted


@pytest.mark.parametrize("status", [0, 1, 2, 75])
def test_a_slurm_job_goes_back_into_the_queue_after_saving_alone(tmp_path, status):
    # One task ends otherwise than the other: the highest counts, as srun has it.
    ends = f'echo "$@" >>words.txt; if [ "$SLURM_PROCID" = 1 ]; then exit {status}; fi'
    done = submit(tmp_path, ends, *TRAIN)
    assert done.returncode == status
    assert (tmp_path / "scontrol.txt").exists() == (status == PREEMPTED)
    if status == PREEMPTED:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 4095\n"
    assert set((tmp_path / "words.txt").read_text().splitlines()) == {
        "supervise -- " + " ".join(TRAIN)
    }
    # A task that has ended leaves the others the time to save.
    assert "--kill-on-bad-exit=0" in (tmp_path / "srun").read_text()


def test_a_slurm_job_that_is_stopped_at_once_is_not_requeued_indefinitely(tmp_path):
    requeued, statuses = tmp_path / "scontrol.txt", []
    for _ in range(5):
        requeued.unlink(missing_ok=True)
        done = submit(tmp_path, "exit 75", *TRAIN)
        statuses.append((done.returncode, requeued.exists()))
        if len(statuses) == 4:
            assert done.stderr == (
                "jaxtrain: stopped 4 times in a row within 3 minutes of its start: not requeued; "
                "look for what stops it (sacct -j 4095), and submit it again\n"
            )
    # Submitted again it has its requeues again.
    assert statuses == [(75, True)] * 3 + [(1, False), (75, True)]


def test_a_slurm_job_that_trains_in_between_is_requeued_each_time(tmp_path):
    # Three starts that are stopped at once, then one that takes four minutes by bash's own clock.
    clock = tmp_path / "minutes.sh"
    clock.write_text("trap 'SECONDS=240' DEBUG\n")
    for number in range(8):
        long = {"BASH_ENV": str(clock)} if number % 4 == 3 else {}
        done = submit(tmp_path, "exit 75", *TRAIN, **long)
        assert (done.returncode, done.stderr) == (75, ""), number


@pytest.mark.parametrize(("seconds", "status"), [(120, 2), (240, 2), (600, 0)])
def test_a_time_limit_below_the_notice_is_rejected(tmp_path, seconds, status):
    dates = {"date": "echo 1000000"}
    end = str(1000000 + seconds)
    done = submit(tmp_path, "exit 0", *TRAIN, others=dates, SLURM_JOB_END_TIME=end)
    assert done.returncode == status
    assert (tmp_path / "srun").read_text().startswith("#!/bin/sh") == (status == 2)  # not called
    if status:
        assert done.stderr == (
            f"jaxtrain: the time limit leaves {seconds} s, and the signal to save comes 180 s "
            "ahead of it; use more than 5 minutes, such as sbatch --time 1:00:00\n"
        )


def test_a_slurm_job_without_a_command_is_told_so(tmp_path):
    done = submit(tmp_path, "exit 0", "llama_1b")
    assert done.returncode == 2
    assert "sbatch slurm.sbatch train llama_1b" in done.stderr


def test_slurm_signals_what_supervise_takes_early_enough():
    text = script_text()
    name, seconds = re.search(r"^#SBATCH --signal=(\w+)@(\d+)$", text, re.M).groups()
    # A signal that a supervisor does not ask for would end it before the run has saved.
    with record_signals():
        assert signal.getsignal(signal.Signals[f"SIG{name}"]) is not signal.SIG_DFL
    assert int(seconds) > supervise.Supervision().grace_seconds
    assert re.search(r"^#SBATCH --requeue$", text, re.M)
    assert re.search(r"^#SBATCH --open-mode=append$", text, re.M)
