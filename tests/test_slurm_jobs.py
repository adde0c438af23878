"""Jobs of a real Slurm with two nodes on this machine: requeued, cancelled, given up.

`munged`, `slurmctld` and two `slurmd` are started for these tests on free ports, with all their
files in a temporary folder. Debian's package is `slurm-wlm`.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from survival import TINY

SCRIPT = Path(__file__).parent.parent / "tpu_scripts" / "slurm.sbatch"
SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=60
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=zz NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes={host},zz Default=YES MaxTime=INFINITE State=UP
"""
PROGRAMS = ("munged", "slurmctld", "slurmd")

pytestmark = pytest.mark.chaos


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of two nodes, the first with a name that resolves; all of it is stopped."""
    if sys.platform != "linux":
        pytest.skip("Linux only")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root can run slurmd here (Linux)")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    host = socket.gethostname().split(".")[0]
    settings = folder / "slurm.conf"
    settings.write_text(SETTINGS.format(folder=folder, host=host, ports=free_ports(3)))
    os.environ["SLURM_CONF"] = str(settings)
    files = [f"--{n}-file={folder}/munge.{n}" for n in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "-F", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", "zz"],
    ]
    started = []
    try:
        for command in commands:
            with (folder / f"{len(started)}-{command[0]}.log").open("wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(1)
        wait_for(lambda: ask("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], 60)
        yield folder
    finally:
        subprocess.run(["scancel", "--user", "root"], check=False, timeout=30)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        del os.environ["SLURM_CONF"]


def ask(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.5)


class Job:
    """A training job of two tasks, submitted as docs/launch.md shows it."""

    def __init__(self, folder, *options, steps=16):
        self.folder = folder
        self.workdir = folder / "run"
        text = folder / "text"
        text.mkdir()
        for number in range(20):
            (text / f"{number:02}.txt").write_text(f"document {number} " * 40)
        config = folder / "tiny.gin"
        config.write_text(TINY.format(text=str(text)))
        # There are no GPUs here, and a line that asks for some cannot be taken back by an option.
        script = folder / SCRIPT.name
        script.write_text(SCRIPT.read_text().replace("#SBATCH --gpus-per-node=8\n", ""))
        words = ["sbatch", "--parsable", *options, str(script), "train"]
        words += [str(config), "--workdir", str(self.workdir), "--simulate-devices", "4"]
        words += ["-b", f"Train.steps = {steps}", "-b", "Timeouts.minimum_seconds = 60"]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        done = subprocess.run(
            words, cwd=folder, env=os.environ | cache, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    def fact(self, name):
        """A value that `scontrol show job` prints."""
        words = ask("scontrol", "show", "job", self.number).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def advance(self, state, seconds=300):
        """Waits for a state; a requeued job starts at once, not after Slurm's two minutes."""
        end = time.monotonic() + seconds
        while (now := self.fact("JobState")) != state:
            assert time.monotonic() < end, (now, self.logs())
            if now == "PENDING":
                ask("scontrol", "update", f"JobId={self.number}", "StartTime=now")
            time.sleep(1)

    def steps(self):
        try:
            lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [step for line in lines if (step := json.loads(line).get("step")) is not None]

    def end(self):
        return json.loads((self.workdir / "exit.json").read_text())

    def logs(self):
        return "".join(log.read_text() for log in sorted(self.folder.glob("*.log")))


def test_a_stopped_job_is_requeued_and_resumes(slurm, tmp_path):
    job = Job(tmp_path, "--time=1:00:00", steps=60)
    wait_for(lambda: max(job.steps(), default=0) >= 3, 300)
    ask("scancel", "--signal=TERM", job.number)
    wait_for(lambda: job.fact("Restarts") == "1", 120)
    stopped = job.end()
    assert stopped["status"] == "preempted"
    assert 3 <= stopped["step"] < 60
    job.advance("COMPLETED")
    assert job.end()["status"] == "done"
    assert f"step {stopped['step']}" in job.logs()
    assert sorted(set(job.steps())) == list(range(1, 61))


def test_a_cancelled_job_is_saved_and_stays_cancelled(slurm, tmp_path):
    job = Job(tmp_path, "--time=1:00:00", steps=10_000)
    wait_for(lambda: max(job.steps(), default=0) >= 3, 300)
    ask("scancel", job.number)
    wait_for(lambda: job.fact("JobState") == "CANCELLED", 120)
    wait_for(lambda: (job.workdir / "exit.json").exists(), 60)
    assert job.end()["status"] == "preempted"
    assert (job.workdir / "checkpoints" / str(job.end()["step"]) / "manifest.json").exists()
    assert job.fact("Restarts") == "0"


SLOW_IMPORTS = """
import sys, time
if "train" in sys.orig_argv and "supervise" not in sys.orig_argv:
    time.sleep(300)
"""


def test_a_time_limit_shorter_than_the_notice_ends_with_a_sentence(slurm, tmp_path, monkeypatch):
    """Slurm sends the signal within half a minute; here Python still imports at that time."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    job = Job(tmp_path, "--time=6", "--signal=TERM@3600")
    job.advance("FAILED", seconds=600)
    assert job.fact("Restarts") == "3"
    assert "before a newer checkpoint was written: not to be queued again" in job.logs()
    assert f"the time limit of Slurm job {job.number} is 360 s" in job.logs()
    assert job.end()["status"] == "failed"
