"""`Plan`: the result of planning, as an object with tables, a figure and JSON."""

import dataclasses
import functools
import html
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain.analysis.planning import show
from jaxtrain.analysis.planning.advice import Fix, remarks
from jaxtrain.analysis.planning.compiled.audit import Row
from jaxtrain.analysis.planning.compiled.collectives import collectives, summarize
from jaxtrain.analysis.planning.compiled.compiled import Compiled
from jaxtrain.analysis.planning.compiled.liveness import Buffer, fullest
from jaxtrain.analysis.planning.goodput.goodput import (
    LEAST_DEVICES,
    Goodput,
    Reliability,
    goodput_of,
)
from jaxtrain.analysis.planning.machines.targets import Target
from jaxtrain.analysis.planning.search.candidates import Found
from jaxtrain.analysis.planning.textbook.facts import Expected
from jaxtrain.analysis.planning.textbook.memory import Memory
from jaxtrain.analysis.planning.textbook.traffic import branch_counts
from jaxtrain.analysis.planning.timing.timing import StepTime
from jaxtrain.analysis.planning.whole_run import WholeRun, project_run
from jaxtrain.nn.attention.kernel_registry import Choice
from jaxtrain.parallel.sharding import Layout
from jaxtrain.run.show.progress import human_seconds
from jaxtrain.training.layouts import resolve_kernel
from jaxtrain.training.settings import Config

# Minimum step time of our loop, with next to no compute (benchmarks/history/cpu.md, "Our loop
# against a bare jitted step": 1.9 ms, 1.5 of them in JAX).
DISPATCH_SECONDS = 2e-3


@dataclasses.dataclass(frozen=True)
class Plan:
    """Result of `jaxtrain plan`; bytes are of one device, traffic and time of one step.

    Attributes:
      config: the configuration.
      target: the machine.
      layout: the layout, on its devices, or abstract if nothing was compiled.
      estimate: memory by closed forms.
      compiled: result of the compiler; None for an estimate.
      expected: expected collectives in closed form.
      rows: collectives of the compiled program with their causes; for an estimate the expected
        ones.
      time: the predicted step time.
      fixes: changes that make it fit if it does not, cheapest first.
      no_compiler: why the requested compile was not possible; None if it was, or not requested.
      found: result of the search; its best is `config`.
      price: dollars per device-hour; None if not set.
      tokens: tokens (images, vectors) of the run, instead of those of Train.steps.
      reliability: failure rate and storage, for the goodput of the whole run.
    """

    config: Config
    target: Target
    layout: Layout
    estimate: Memory
    compiled: Compiled | None
    expected: list[Expected]
    rows: list[Row]
    time: StepTime
    fixes: list[Fix]
    no_compiler: str | None = None
    found: Found | None = None
    price: float | None = None
    tokens: float | None = None
    reliability: Reliability = Reliability()

    @property
    def attention(self) -> Choice | None:
        """The selected attention kernel and the reason; None for a model without attention."""
        return resolve_kernel(self.config, self.target.chip.kind)

    # -- memory ---------------------------------------------------------------------------------

    @property
    def arguments(self) -> int:
        """State and batch."""
        if self.compiled is not None:
            return self.compiled.argument_bytes
        return self.estimate.arguments.total

    @property
    def temporaries(self) -> int:
        """Bytes in addition to the arguments, as reported by the compiler, else as estimated."""
        if self.compiled is None or self.compiled.temp_bytes is None:
            return self.estimate.temporaries
        return self.compiled.temp_bytes

    @property
    def total(self) -> int:
        """Total memory of the step."""
        return (
            self.arguments
            + self.temporaries
            + (self.compiled.unaliased_bytes if self.compiled else 0)
        )

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a device."""
        if self.compiled is not None and self.compiled.error is not None:
            return False
        if self.compiled is not None and self.target.chip.kind == "tpu":
            return True  # its compiler rejects what does not fit
        return self.target.chip.hbm_bytes is None or self.total <= self.target.chip.hbm_bytes

    @property
    def repeated(self) -> int:
        """Number of operations that the compiler rematerializes by itself to save memory."""
        return 0 if self.compiled is None else self.compiled.repeated

    @property
    def verdict(self) -> str:
        """`fits` in words; a program that compiles does not necessarily fit."""
        if self.fits:
            return "fits"
        if self.compiled is None or self.compiled.error is not None:
            return "does not fit"
        return "compiles, but would run out of memory"

    @functools.cached_property
    def buffers(self) -> list[Buffer]:
        """The arrays live at the program's memory peak, largest first; [] for an estimate."""
        return fullest(self.compiled.text) if self.compiled and self.compiled.text else []

    @property
    def is_text(self) -> bool:
        """Whether examples are token sequences."""
        return self.config.train.model.inputs == "tokens"

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens, images or vectors per second and device; None without a time."""
        if self.time.seconds is None:
            return None
        return self.per_step / self.time.seconds / self.devices

    @property
    def per_step(self) -> int:
        """Tokens, images or vectors of the global batch."""
        train = self.config.train
        each = train.data.abstract_batch(1).inputs.shape[1] if self.is_text else 1
        return train.global_batch_size * each

    @functools.cached_property
    def whole_run(self) -> WholeRun | None:
        """Duration and cost of all steps; None without a time."""
        if self.time.seconds is None:
            return None
        return project_run(
            step_seconds=self.time.seconds,
            devices=self.devices,
            per_step=self.per_step,
            steps=self.config.train.steps,
            examples=self.tokens,
            price=self.price,
            watts=self.target.chip.watts,
        )

    @functools.cached_property
    def goodput(self) -> Goodput | None:
        """The whole run under failures, if requested or from 64 devices on; None without a time."""
        if not self.reliability.is_requested and self.devices < LEAST_DEVICES:
            return None
        return goodput_of(self, self.reliability)

    @property
    def devices(self) -> int:
        """Number of devices of all slices."""
        return self.layout.mesh.size

    @functools.cached_property
    def advice(self) -> list[str]:
        """Sentences on how to make it fit, audit findings and unused options."""
        warnings = self.compiled.warnings if self.compiled else ()
        why = [] if self.no_compiler is None else [f"nothing was compiled: {self.no_compiler}"]
        if self.repeated:
            why.append(
                f"the compiler rematerializes {self.repeated} operations by itself to fit into "
                "memory: a layout that needs a little less (Remat, more devices) may be faster"
            )
        if self.time.seconds is not None and self.time.seconds < DISPATCH_SECONDS:
            why.append(
                f"the predicted step of {human_seconds(self.time.seconds)} is shorter than the "
                f"{human_seconds(DISPATCH_SECONDS)} that a host takes to dispatch one, which "
                "the prediction does not include: the run will be bound by launch overhead and "
                "devices will be idle; a larger Train.global_batch_size or a larger model uses "
                "them"
            )
        return [
            *why,
            *(fix.sentence for fix in self.fixes),
            *remarks(self.config, self.target, self.layout, self.rows, warnings),
        ]

    # -- reports --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the object of `plan --json`."""
        gradients = min(self.estimate.gradients, self.temporaries)
        compiled, time = self.compiled, self.time
        closed = None if time.seconds is None else time.estimate or time
        found: dict[str, Any] = {
            "target": self.target.name,
            "devices": self.devices,
            "attention": None if self.attention is None else dataclasses.asdict(self.attention),
            "mesh": {axis: size for axis, size in self.layout.mesh.shape.items()},
            "fits": self.fits,
            "hbm_bytes": self.target.chip.hbm_bytes,
            "estimate": compiled is None,
            "memory": {
                "params": self.estimate.arguments.params,
                "optimizer": self.estimate.arguments.optimizer,
                "gradients": gradients,
                "activations": self.temporaries - gradients,
                "total": self.total,
                "arguments": self.arguments,
                "temporaries": self.temporaries,
                "live": compiled.live_bytes if compiled else None,
                "host": compiled.host_bytes if compiled else self.estimate.host,
                "disk": self.estimate.arguments.disk,
                "closed_form": {
                    "arguments": self.estimate.arguments.total,
                    "host": self.estimate.host,
                    "disk": self.estimate.arguments.disk,
                    "gradients": self.estimate.gradients,
                    **self.estimate.parts,
                },
                "not_counted": self.estimate.left_out,
            },
            "collectives": self._summary(),
            "traffic": [dataclasses.asdict(row) for row in self.rows],
            "flops_per_device": time.flops_per_device,
            "step_seconds": time.seconds,
            "mfu": time.mfu,
            "error_bar": time.error_bar,
            "tokens_per_second_per_device": self.tokens_per_second,
            "tflops_per_device": time.tflops,
            "time": {
                "compute": time.compute,
                "exposed_communication": time.exposed,
                "bubble": time.bubble,
                "hidden_communication": time.hidden,
                "kernels": time.kernels,
                "source": "closed forms" if time.estimate is None else "schedule",
                "calibration": self._calibration(),
                "closed_form": closed
                and {
                    "step_seconds": closed.seconds,
                    "mfu": closed.mfu,
                    "compute": closed.compute,
                    "exposed_communication": closed.exposed,
                    "bubble": closed.bubble,
                    "hidden_communication": closed.hidden,
                },
                "assumptions": list(time.assumptions),
            },
            "run": None if self.whole_run is None else dataclasses.asdict(self.whole_run),
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "compile_seconds": compiled.seconds if compiled else None,
            "cached": compiled.cached if compiled else None,
            "advice": self.advice,
        }
        if self.found is not None:
            found |= self.found.to_json()
        return found

    def _calibration(self) -> dict[str, Any] | None:
        made, profile = self.target.calibration, self.time.profile
        if made is None or profile is None:
            return None
        return {
            "measured": made.measured,
            "predicted": made.predicted,
            "source": made.source,
            "family": made.family,
            "ratio": made.ratio,
            "exponent": made.profile.exponent(profile),
            "factor": self.time.factor,
        }

    def _summary(self) -> list[dict[str, Any]]:
        if self.compiled and self.compiled.text:
            return summarize(collectives_of(self.config, self.layout, self.compiled))
        together: dict[tuple[str, str], list[int]] = {}
        for one in self.expected:
            counted = together.setdefault((one.kind, one.axis), [0, 0])
            counted[0] += one.count
            counted[1] += one.count * one.bytes
        return [
            {"kind": kind, "axis": axis, "count": count, "bytes": size}
            for (kind, axis), (count, size) in sorted(together.items())
        ]

    def table(self) -> str:
        """Return the tables of the terminal as text."""
        console = Console(width=110, no_color=True, force_terminal=False)
        with console.capture() as captured:
            show.show(console, self)
        return captured.get()

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot memory against capacity, time and traffic; save the figure if `path` is given."""
        figure = show.plan_figure(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table(), quote=False)}</pre>"

    def __repr__(self) -> str:
        # Without the fields: a notebook stores this text, and the compiled program has megabytes.
        return f"Plan({self.target.name}, {self.total:,} bytes per device, {self.verdict})"


def collectives_of(config: Config, layout: Layout, compiled: Compiled) -> list[Any]:
    """Return the collectives of a compiled step per device, with loops multiplied out."""
    return collectives(compiled.text, dict(layout.mesh.shape), branch_counts(config, layout))
