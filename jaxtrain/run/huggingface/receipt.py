"""Parity report of an import or an export: comparison of tensors and logits.

Every tensor is compared bit by bit with the conversion of our parameters: that finds a tensor
that was lost, but not a misread file, since both sides were read here. If
transformers can read the files, the same tokens go through both models: only that is parity.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from jaxtrain.data.batch import Batch
from jaxtrain.models.model import Model, reads_images, reads_pairs, token_model
from jaxtrain.models.transformers.bert import BERT
from jaxtrain.models.weights.folder import StoredTensor
from jaxtrain.models.weights.formats.safetensors import raw
from jaxtrain.nn.execution import Execution
from jaxtrain.nn.parameters import Statistic
from jaxtrain.run.inference.outputs import logits
from jaxtrain.run.show.progress import print_lines
from jaxtrain.training.finetune.tuning import partition
from jaxtrain.training.setup import Setup
from jaxtrain.training.state import TrainState

TOLERANCE = 1e-4  # relative to the largest logit, at least 1: float32 in another summation order
# Both models are in memory at once, theirs in float32: 8 GB.
MOST_PARAMETERS = 2_000_000_000
_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Logits:
    """Difference of the logits of the same tokens, in float32.

    Attributes:
      tokens: number of random tokens, or images.
      largest_difference: maximum absolute difference of all logits.
      largest_logit: the largest absolute value, theirs.
      against: the program of the other logits.
      independent: whether that program read the files itself.
    """

    tokens: int
    largest_difference: float
    largest_logit: float
    against: str
    independent: bool

    @classmethod
    def of(
        cls, ours: np.ndarray, theirs: np.ndarray, tokens: int, against: str, *, independent: bool
    ) -> "Logits":
        """Return the comparison of two models' logits."""
        difference = float(np.abs(ours - theirs).max())
        return cls(tokens, difference, float(np.abs(theirs).max()), against, independent)

    @property
    def agree(self) -> bool:
        """Whether they differ by rounding alone."""
        return self.largest_difference <= TOLERANCE * max(1.0, self.largest_logit)


@dataclasses.dataclass(frozen=True)
class Receipt:
    """The comparison of a folder with a run's parameters.

    Attributes:
      folder: the published model.
      architecture: its name.
      parameters: number of elements of its tensors, including running statistics.
      digests: sha256 of each of its tensors as stored in its file.
      differing: names of the tensors that differ from our parameters.
      logits: of both models; None if they were not compared.
      why_not: the reason, if they were not compared with another program's.
      ancestors: of an export, the run's checkpoint and its origins; see `metadata`.
      training_differences: of an import, differences from training in transformers.
    """

    folder: str
    architecture: str
    parameters: int
    digests: dict[str, str]
    differing: tuple[str, ...]
    logits: Logits | None
    why_not: str | None
    ancestors: tuple[dict[str, Any], ...] = ()
    training_differences: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether both sides are the same model."""
        return not self.differing and (self.logits is None or self.logits.agree)

    @property
    def compared_with(self) -> str:
        """The program that the files were compared with."""
        return self.logits.against if self.logits and self.logits.independent else "itself"

    def to_json(self) -> dict[str, Any]:
        """Content of parity.json."""
        head = {"passed": self.passed, "compared_with": self.compared_with}
        return {**head, **dataclasses.asdict(self)}

    def show(self, console: Console) -> None:
        """Print the results of the comparison."""
        count = len(self.digests)
        same = (
            f"{count - len(self.differing)} of {count} tensors are bit for bit those of "
            f"{self.folder} ({self.architecture}, {self.parameters:,})"
        )
        lines = []
        if self.logits is not None:
            name = "Parity" if self.logits.independent else "Compared with itself"
            lines.append(
                f"{name}: the largest difference of a logit over {self.logits.tokens} inputs is "
                f"{self.logits.largest_difference:.2e}, of logits up to "
                f"{self.logits.largest_logit:.3g} ({self.logits.against})"
            )
        lines.append(f"Compared with itself: {same}")
        if self.differing:
            lines.append(f"Differing: {', '.join(self.differing[:8])}")
        if self.compared_with == "itself":
            lines.append(f"Not compared with another program: {self.why_not}")
        lines += [
            f"Training differs from transformers': {one}" for one in self.training_differences
        ]
        print_lines(console, *lines)


def compare(
    folder: Path,
    architecture: str,
    stored: Mapping[str, StoredTensor],
    made: Iterable[tuple[str, np.ndarray]],
    setup: Setup,
    model: Model,
    params: nnx.State,
    *,
    called: Path | None = None,
    read_otherwise: str | None = None,
) -> Receipt:
    """Compare a folder's tensors with our converted parameters, and both models' logits.

    Args:
      folder: of the published model, or its one file.
      architecture: its name.
      stored: its tensors by the map's names.
      made: the same from our parameters.
      setup: of the parameters.
      model: its sizes.
      params: the parameters.
      called: the folder's final name.
      read_otherwise: why transformers reads the files differently, which makes a comparison
        meaningless.
    """
    digests, differing = compare_tensors(stored, made)
    count = sum(math.prod(tensor.shape) for tensor in stored.values())
    found = why_not = None
    if (
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("torch") is None
    ):
        why_not = "transformers and PyTorch are not installed"
    elif read_otherwise is not None:
        why_not = read_otherwise
    elif folder.is_file() and importlib.util.find_spec("gguf") is None:
        why_not = "transformers reads GGUF with the package gguf, which is not installed"
    elif model.experts is not None and model.experts.capacity_factor is not None:
        why_not = "experts with a capacity drop tokens, which transformers does not"
    elif count > MOST_PARAMETERS:
        why_not = f"more than {MOST_PARAMETERS:,} parameters would be in memory twice"
    else:
        inputs, given = draw_input(model)
        theirs = _logits_of_transformers(folder, architecture, given)
        if isinstance(theirs, str):
            why_not = theirs
        else:
            ours = logits_of(setup, model, params, inputs)
            if theirs.ndim < ours.ndim:
                ours = ours[:, 0]  # a text's class is predicted at its first token
            version = importlib.metadata.version("transformers")
            num_positions = math.prod(
                next(iter(given.values())).shape[: 1 if reads_images(model) else 2]
            )
            against = f"transformers {version}"
            found = Logits.of(ours, theirs, num_positions, against, independent=True)
    return Receipt(str(called or folder), architecture, count, digests, differing, found, why_not)


def compare_tensors(
    stored: Mapping[str, StoredTensor], made: Iterable[tuple[str, np.ndarray]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the digest of each tensor of a folder, and the names of those that are not what was
    made.

    Args:
      stored: the folder's, by name.
      made: the same from our parameters.
    """
    digests, differing = {}, []
    for name, ours in made:
        theirs = np.asarray(stored[name].open())
        digests[name] = sha256(raw(theirs)).hexdigest()
        if not _same(theirs, ours):
            differing.append(name)
    return digests, tuple(differing)


def _same(theirs: np.ndarray, ours: np.ndarray) -> bool:
    """Whether two tensors are equal bit for bit in the narrower of their dtypes."""
    narrow = ours.dtype if ours.dtype.itemsize <= theirs.dtype.itemsize else theirs.dtype
    return np.array_equal(raw(theirs.astype(narrow)), raw(ours.astype(narrow)))


def draw_input(model: Model) -> tuple[np.ndarray | Batch, dict[str, np.ndarray]]:
    """Tokens from a seed, of one row, or an image, for `Trainer.logits` and by transformers'
    names."""
    rng = np.random.default_rng(0)
    if reads_images(model):
        side = model.least_pixels
        image_BHWC = rng.standard_normal((1, side, side, model.channels), np.float32)
        return image_BHWC, {"pixel_values": image_BHWC.transpose(0, 3, 1, 2).copy()}
    if not reads_pairs(model):
        sizes = token_model(model)
        shape = (1, min(_LENGTH, sizes.context_length))
        tokens_BT = rng.integers(0, sizes.vocab_size, shape)
        if isinstance(model, BERT) and model.first_position:
            tokens_BT[tokens_BT == model.first_position - 1] = 0  # padding is not supported there
        return tokens_BT, {"input_ids": tokens_BT}
    shape = (1, min(_LENGTH, model.context_length))
    source_BS, tokens_BT = rng.integers(0, model.vocab_size, (2, *shape))
    ones, counts = np.ones(shape, np.int32), np.ones(shape, np.float32)
    pair = Batch(tokens_BT, tokens_BT, counts, ones, source=source_BS, source_segment_ids=ones)
    return pair, {"input_ids": source_BS, "decoder_input_ids": tokens_BT}


def logits_of(
    setup: Setup, model: Model, params: nnx.State, inputs: np.ndarray | Batch
) -> np.ndarray:
    """Our logits [B, T, V] of tokens or of a batch, or [B, C] of images, computed in float32.

    `params` holds running statistics too, where the model has such.
    """
    statistics, params = partition(params, lambda _, x: isinstance(x, Statistic))
    zero = jnp.zeros(())
    state = TrainState(
        step=zero, params=params, opt_state=(), statistics=statistics, loss_scale=zero
    )
    return logits_of_state(setup, model, state, inputs)


def logits_of_state(
    setup: Setup, model: Model, state: TrainState, inputs: np.ndarray | Batch
) -> np.ndarray:
    """As `logits_of`, of a state."""
    precision = dataclasses.replace(setup.precision, compute="float32")
    setup = dataclasses.replace(setup, precision=precision, execution=Execution())
    return logits(setup, model, state, inputs)


def _logits_of_transformers(
    folder: Path, architecture: str, inputs: Mapping[str, np.ndarray]
) -> np.ndarray | str:
    """Return transformers' logits, or why there are none; transformers is optional."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    files: dict[str, Any] = {"use_safetensors": True}
    if folder.is_file():
        folder, files = folder.parent, {"gguf_file": folder.name}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting disables
            model = getattr(transformers, architecture).from_pretrained(
                folder, dtype="float32", local_files_only=True, trust_remote_code=False, **files
            )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"transformers cannot load it ({str(error).splitlines()[0]})"
    with torch.no_grad():
        given = {name: torch.from_numpy(tokens) for name, tokens in inputs.items()}
        output = model.eval()(**given)
        if "logits" not in output:  # without a head: from the transposed embedding
            embedding_VD = model.get_input_embeddings().weight
            return (output.last_hidden_state @ embedding_VD.T).float().numpy()
        return output.logits.float().numpy()
