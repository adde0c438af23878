"""Report of versions, devices and missing packages of each extra (`jaxtrain doctor`)."""

import importlib.metadata
import os
import platform

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxtrain.run.cluster.detection import detect

# Extra -> the distributions that it installs.
EXTRAS = {
    "cuda13": ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "tpu": ("libtpu",),
    "gcs": ("gcsfs",),
    "formats": ("pyarrow",),
    "gguf": ("gguf",),
    "chat": ("jinja2",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny",),
    "demo": ("scikit-learn", "mlxtend"),
    "dev": ("pytest", "ruff", "torch", "transformers"),
}
CORE = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain",
        "tensorflow-datasets", "gin-config", "numpy")  # fmt: skip


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(console: Console) -> int:
    """Print the tables; return the exit status."""
    table = Table(title="Versions", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    table.add_row("python", platform.python_version())
    for name in CORE:
        table.add_row(name, installed_version(name) or "not installed")
    console.print(table)

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    console.print(
        f"Devices: {len(devices)} {', '.join(kinds)} ({jax.default_backend()}), "
        f"{jax.process_count()} process(es)"
    )
    console.print(detect(os.environ).found)
    if jax.default_backend() == "cpu":
        console.print("No accelerator: --simulate-devices N makes a mesh of N simulated devices")

    extras = Table(title="Extras", title_justify="left")
    for column in ("extra", "missing", "how to get it"):
        extras.add_column(column, overflow="fold")
    for extra, names in EXTRAS.items():
        missing = [name for name in names if installed_version(name) is None]
        how = f"pip install 'jaxtrain[{extra}]'" if missing else ""
        extras.add_row(extra, ", ".join(missing) or "nothing", escape(how))
    console.print(extras)
    return 0
