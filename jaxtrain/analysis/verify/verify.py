"""`verify`: check a configuration, shrunk, on eight simulated devices."""

import dataclasses
import math
import os
import time
from collections.abc import Callable

from jaxtrain.analysis.verify.measures import NotChecked
from jaxtrain.analysis.verify.meshes import DEVICES
from jaxtrain.analysis.verify.proofs import claims
from jaxtrain.analysis.verify.report import Proof, Report
from jaxtrain.analysis.verify.runs import Bench
from jaxtrain.analysis.verify.shrink import Small, shrink
from jaxtrain.config.errors import UserError
from jaxtrain.data.pairs.source import PairData
from jaxtrain.data.pairs.spans import SpanData
from jaxtrain.data.text.source import text_of
from jaxtrain.models.model import reads_pairs, reads_tokens
from jaxtrain.nn.attention.kernel_registry import KERNELS
from jaxtrain.parallel.devices import simulate_devices
from jaxtrain.parallel.mesh import MESH_AXES
from jaxtrain.training.preflight import preflight
from jaxtrain.training.settings import Config

# Every program runs only a few times, so these flags disable LLVM's optimizations of machine code,
# but not XLA's own passes (partitioning, fusion, memory). This halves the time.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def simulate() -> None:
    """Make JAX run on eight simulated CPU devices; call before the backend is initialized.

    Raises:
      UserError: JAX already runs on other devices in this process.
    """
    os.environ["XLA_FLAGS"] = f"{_XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    simulate_devices(DEVICES)


def verify(
    config: Config,
    *,
    on_small: Callable[[Small], None] = lambda _: None,
    on_proof: Callable[[Proof], None] = lambda _: None,
) -> Report:
    """Verify a configuration, shrunk to sizes that run in seconds, on random data.

    Args:
      config: the user's configuration, of any size.
      on_small: called with the shrunk configuration before the first proof.
      on_proof: called with each proof when it is done.

    Raises:
      UserError: the configuration cannot run on its own devices.
    """
    began = time.monotonic()
    validate(config)
    small = shrink(config)
    on_small(small)
    proofs = []
    for claim in claims(Bench(small)):
        start = time.monotonic()
        found = claim.prove()
        seconds = time.monotonic() - start
        if isinstance(found, NotChecked):
            proof = Proof(claim.proof, claim.what, None, None, "not checked", seconds, found.reason)
        else:
            verdict = "proved" if found.measured <= found.limit else "FAILED"
            proof = Proof(
                claim.proof, claim.what, found.measured, found.limit, verdict, seconds, found.detail
            )
        proofs.append(proof)
        on_proof(proof)
    return Report(small, tuple(proofs), time.monotonic() - began)


def validate(config: Config) -> None:
    """Raise UserError if the configuration cannot run on its devices.

    If an axis is -1, the number of devices is unknown: the configuration is valid if it can run
    with size 1 or 2 of that axis.
    """
    model, data = config.train.model, config.train.data
    text = text_of(data)
    # Neither the text nor the tokenizer needs to be on this machine.
    if text is not None and reads_tokens(model):
        vocabulary = max(model.vocab_size, 2)
        data = dataclasses.replace(
            text, source="synthetic", heldout_split=None, synthetic_vocab_size=vocabulary
        )
    if isinstance(data, PairData | SpanData) and reads_pairs(model):
        data = PairData(
            source="synthetic",
            synthetic_vocab_size=max(model.vocab_size, 2),
            source_length=data.source_length,
            target_length=data.target_length,
        )
    train = dataclasses.replace(config.train, data=data)
    sizes = [getattr(config.mesh, axis) for axis in MESH_AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    counts = (2 * fixed, fixed) if -1 in sizes else (fixed,)
    # Validate each kernel on its own platform, whatever the platform of this machine.
    named = KERNELS.get(config.attention.kernel)
    platform = (None if named is None else named.only_on) or "gpu"
    errors = []
    for count in counts:
        try:
            preflight.check(
                dataclasses.replace(config, train=train), device_count=count, platform=platform
            )
        except UserError as error:
            errors.append(error)
    if len(errors) == len(counts):
        raise errors[0]
