"""What `jaxtrain train` says when its devices run out of memory: what is too big, what to do."""

import jax

from jaxtrain.planning.advice import fixes_for
from jaxtrain.planning.hardware import CHIPS, chip_of
from jaxtrain.planning.pricing import price
from jaxtrain.planning.targets import Target
from jaxtrain.report import human_bytes
from jaxtrain.settings import Config

# Parts that are named.
_LARGEST = 4
# libtpu's words where tiles do not fit, whatever the size of the model.
_OF_ONE_OPERATION = "memory space vmem"


class OutOfMemory(Exception):  # noqa: N818 - what happened, as the user calls it
    """The devices do not hold a run; the message says why and what to do."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether XLA gave up for want of memory, while compiling or running."""
    return "RESOURCE_EXHAUSTED" in str(error)


def explain(config: Config, said: str) -> str:
    """What fills a device by closed forms, and the cheapest fixes as bindings to paste.

    Args:
      config: of the run that failed, on this process's devices.
      said: XLA's words.
    """
    if _OF_ONE_OPERATION in said:
        return _explain_vector_memory(said)
    target = _this_machine()
    needed = price(config, target).memory
    parts = {
        "parameters": needed.arguments.params,
        "optimizer state": needed.arguments.optimizer,
        "gradients": needed.gradients,
        **needed.parts,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_LARGEST]
    words = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest)
    room = target.chip.hbm_bytes
    capacity = "" if room is None else f" of {human_bytes(room)}"
    # The estimate may be below the room while XLA's own needs are not: then a tenth has to go.
    over = max(needed.total - (room or needed.total), needed.total // 10)
    lines = [
        f"out of memory: {said.splitlines()[0]}",
        f"By closed forms a device needs {human_bytes(needed.total)}{capacity}: {words}.",
    ]
    fixes = fixes_for(config, target, over=over)
    lines += ["The cheapest fixes first:"] if fixes else []
    lines += [f"- {fix.sentence}" for fix in fixes]
    lines.append("'jaxtrain plan CONFIG --target TARGET' checks a fix without the machine.")
    return "\n".join(lines)


def _explain_vector_memory(said: str) -> str:
    """A TPU's vector memory holds tiles of the operations that run: nothing of a model's size."""
    line = next(line for line in said.splitlines() if _OF_ONE_OPERATION in line)
    return (
        f"out of vector memory, which holds what a TPU works on at the moment, not the model: "
        f"{line[:300]}\n"
        "Less of it for products: LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=16384 before "
        "the command (docs/performance.md, XLA flags)."
    )


def _this_machine() -> Target:
    chip = chip_of(jax.devices()[0].device_kind) or CHIPS["cpu"]
    count = jax.device_count()
    if chip.kind == "gpu":
        return Target(chip, (jax.process_count(), count // jax.process_count()))
    return Target(chip, (count // 2 if chip.name == "7x" else count,))
