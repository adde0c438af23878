"""Hosts as network namespaces of one Linux machine, each with a name, an address and a link.

Needs root and iproute2. Each host has its own network and UTS namespace and /etc/hosts; a bridge in
a namespace of its own joins them. The hosts share the disk and the process numbers.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Compiles fast on few cores.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def missing() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "no iproute2 or nsenter"
    name = f"jaxtrain-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return "network namespaces need root"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """One host.

    Attributes:
      name: its name.
      address: its address.
      folder: its own disk.
    """

    def __init__(self, hub: str, number: int, name: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, f"10.77.0.{number + 1}", folder
        self._hub, self._space = hub, f"{hub}-{number}"
        self._here, self._there = f"jt{number}a{os.getpid()}"[:15], f"jt{number}b{os.getpid()}"[:15]
        _ip("netns", "add", self._space)
        _ip("-n", self._space, "link", "add", self._here, "type", "veth", "peer", self._there)
        _ip("-n", self._space, "link", "set", self._there, "netns", hub)
        _ip("-n", hub, "link", "set", self._there, "master", "bridge")
        _ip("-n", hub, "link", "set", self._there, "up")
        _ip("-n", self._space, "addr", "add", f"{self.address}/24", "dev", self._here)
        _ip("-n", self._space, "link", "set", self._here, "up")
        _ip("-n", self._space, "link", "set", "lo", "up")
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(
        self, words: Sequence[str], hosts_file: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen:
        """Start a command; its output goes to `log` in the host's folder.

        Args:
          words: the command.
          hosts_file: of names and addresses, its /etc/hosts.
          environment: its variables.
        """
        script = f'mount --bind {hosts_file} /etc/hosts && hostname {self.name} && exec "$@"'
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *words]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._space}", *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=dict(environment),
            )

    def log(self) -> str:
        """What its commands have printed."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def cut(self) -> None:
        """Cut its link: packets are lost, nothing is closed."""
        _ip("-n", self._hub, "link", "set", self._there, "down")

    def join(self) -> None:
        """Restore its link."""
        _ip("-n", self._hub, "link", "set", self._there, "up")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._space], capture_output=True, text=True, check=True
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def lose(self) -> None:
        """Lose it as by a power cut: its link first, so that no connection is closed."""
        self.cut()
        for _ in range(2):  # a process may have started another
            self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Remove it."""
        self.lose()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self._space)


class Hosts:
    """Hosts of one elastic run, and its folder.

    Attributes:
      each: the hosts by name.
      workdir: the run's folder, on the disk that they share.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.workdir = folder, folder / "run"
        self._hub = f"jaxtrain-{os.getpid()}"
        self.each: dict[str, Host] = {}
        self._processes: dict[str, subprocess.Popen] = {}
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            self.each[name] = Host(self._hub, number, name, folder / f"host-{name}")
        self._file = folder / "hosts"
        lines = [f"{host.address} {host.name}\n" for host in self.each.values()]
        self._file.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start(self, name: str, hosts: str, train: Sequence[str], *options: str) -> None:
        """Start the supervisor of a host, with one simulated device a host.

        Args:
          name: of the host.
          hosts: MIN:MAX.
          train: the words after `train`, without --workdir.
          options: more options of `supervise`.
        """
        host = self.each[name]
        words = [sys.executable, "-P", "-m", "jaxtrain", "supervise", "--hosts", hosts, *options]
        words += ["--", "train", *train, "--workdir", str(self.workdir)]
        hidden = ("SLURM_", "OMPI_", "PMI_", "JAX_", "JAXTRAIN_", "XLA_", "TPU_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAXTRAIN_CACHE": str(host.folder / "cache"),
            "TPU_SKIP_MDS_QUERY": "1",
            "XLA_FLAGS": XLA_FLAGS,
        }
        self._processes[name] = host.start(words, self._file, environment)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a host's supervisor."""
        self._processes[name].send_signal(signal.SIGTERM)

    def is_running(self, name: str) -> bool:
        """Whether a host's supervisor runs."""
        return self._processes[name].poll() is None

    def wait(self, name: str, seconds: float) -> int:
        """Return the exit status of a host's supervisor."""
        return self._processes[name].wait(seconds)

    def steps(self) -> int:
        """Return the newest logged step."""
        file = self.workdir / "metrics.jsonl"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        for line in reversed(lines):
            if '"loss"' in line and '"step": ' in line:
                return int(line.split('"step": ')[1].split(",")[0])
        return 0

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        """Wait until a step is logged."""
        self.wait_until(lambda: self.steps() >= step, seconds)

    def wait_for_line(self, name: str, text: str, seconds: float = 120.0) -> None:
        """Wait until a host has printed a text."""
        self.wait_until(lambda: text in self.each[name].log(), seconds)

    def wait_until(self, condition, seconds: float) -> None:
        """Wait until a condition holds.

        Raises:
          AssertionError: the time is up; the logs are quoted.
        """
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = [f"-- {host.name}\n{host.log()[-3000:]}" for host in self.each.values()]
                raise AssertionError("\n".join(["nothing happened", *logs]))
            time.sleep(0.02)

    def close(self) -> None:
        """End all processes and remove the hosts."""
        for host in self.each.values():
            host.close()
        for process in self._processes.values():
            process.wait()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self._hub)


@contextlib.contextmanager
def network(folder: Path, names: Sequence[str] = ("a", "b", "c", "d")) -> Iterator[Hosts]:
    """Context of hosts that are joined by a bridge."""
    hosts = Hosts(folder, names)
    try:
        yield hosts
    finally:
        hosts.close()


CONFIG = """
Train.model = @GPT()
Train.data = @TextData()
Train.steps = {steps}
Train.global_batch_size = 8
Train.log_every = 1
Train.save_every = {save_every}
GPT.vocab_size = 256
GPT.num_layers = 1
GPT.embed_dim = 16
GPT.num_heads = 2
GPT.context_length = 16
TextData.source = {text!r}
TextData.sequence_length = 16
Mesh.data = 4
Mesh.fsdp = 1
Precision.compute = 'float32'
Optimizer.learning_rate = 0.001
"""


def write_config(folder: Path, *, steps: int, save_every: int) -> Path:
    """Write a tiny language model's configuration, for 4 hosts of one device, and its data."""
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        (text / f"{number:02}.txt").write_text(f"document {number} " * 40)
    file = folder / "tiny.gin"
    file.write_text(CONFIG.format(steps=steps, save_every=save_every, text=str(text)))
    return file
