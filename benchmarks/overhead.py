"""What our loop costs: `Trainer.train` against a bare jitted step in a bare loop, same mathematics.

    python -m benchmarks.overhead [--rounds 9]

The bare side is what one writes without a framework: a dict of arrays, a loss, optax and `jax.jit`,
on batches that lie in memory and without any log. Ours draws its batches from the real loader and
keeps its metrics. Both are timed at two lengths and the difference is divided by the steps between,
so that what happens once a call (the evaluation at the end) is in neither.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from benchmarks import side_by_side
from benchmarks.cpu_rows import COMMON, DECODER
from jaxtrain.data.loader import batches
from jaxtrain.nn.attention.blocked import blocked_attention
from jaxtrain.nn.attention.mask import Mask
from jaxtrain.run.trainer import Trainer
from jaxtrain.training.settings import load_config

ADAMW = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8}
# name: layers, width, heads, tokens a row, rows, steps of a short run
SIZES = {
    "tiny: 1 layer x 32, T 32, batch 4": (1, 32, 2, 32, 4, 400),
    "nanoGPT char: 4 layers x 128, T 64, batch 12": (4, 128, 4, 64, 12, 15),
}


def trainer_of(layers: int, dim: int, heads: int, length: int, batch: int) -> Trainer:
    """Ours, with the shipped quickstart config and these sizes."""
    bindings = [
        *COMMON, *DECODER,
        f"GPT.num_layers = {layers}", f"GPT.embed_dim = {dim}", f"GPT.num_heads = {heads}",
        f"GPT.context_length = {length}", "GPT.vocab_size = 65", "TextData.source = 'synthetic'",
        "TextData.synthetic_vocab_size = 65", f"TextData.sequence_length = {length}",
        "TextData.separate_documents = False", f"Train.global_batch_size = {batch}",
        "Optimizer.learning_rate = 1e-3", "Train.eval_batches = 1", "Train.eval_every = 0",
        "Train.save_every = 0", "Train.log_every = 10",
    ]  # fmt: skip
    return Trainer(load_config("gpt_quickstart", bindings))


# -- the bare step ---------------------------------------------------------------------------------


def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h = norm(x, w["attention_norm_scale"], w["attention_norm_bias"])
    q, k, v = jnp.einsum("BTD,PDNH->PBTNH", h, w["qkv"]) + w["qkv_bias"][:, None, None]
    a = blocked_attention(q, k, v, Mask())
    x = x + jnp.einsum("BTNH,NHD->BTD", a, w["out"]) + w["out_bias"]
    h = norm(x, w["mlp_norm_scale"], w["mlp_norm_bias"])
    h = jax.nn.gelu(h @ w["up"] + w["up_bias"])
    return x + h @ w["down"] + w["down_bias"], None


def loss_of(w: dict[str, Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = w["token_embedding"][tokens] + w["position_embedding"][: tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, w["layers"])
    logits = norm(x, w["norm_scale"], w["norm_bias"]) @ w["token_embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def is_matrix(path: Any, x: jax.Array) -> bool:
    name = path[-1].key
    return not name.endswith(("bias", "scale")) and x.ndim >= 2


def bare_step(optimizer: optax.GradientTransformation) -> Any:
    """(weights, moments, tokens, targets) -> (weights, moments, loss), jitted and donated."""

    def step(w: Any, moments: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(w, tokens, targets)
        updates, moments = optimizer.update(gradients, moments, w)
        return optax.apply_updates(w, updates), moments, loss

    return jax.jit(step, donate_argnums=(0, 1))


class Bare:
    """Weights, moments and the jitted step."""

    def __init__(self, weights: dict[str, Any]) -> None:
        mask = jax.tree_util.tree_map_with_path(is_matrix, weights)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(**ADAMW, weight_decay=0.1, mask=mask)
        )
        self.weights, self.moments = weights, self.optimizer.init(weights)
        self.step = bare_step(self.optimizer)

    def run(self, data: list[Any], steps: int) -> list[jax.Array]:
        """Losses of these steps, not waited for but the last."""
        losses = []
        for i in range(steps):
            batch = data[i % len(data)]
            self.weights, self.moments, loss = self.step(
                self.weights, self.moments, batch.inputs, batch.targets
            )
            losses.append(loss)
        losses[-1].block_until_ready()
        return losses


# -- the comparison --------------------------------------------------------------------------------


def nested(params: Any) -> dict[str, Any]:
    """Copies of a model's parameters as nested dicts of arrays."""
    out: dict[str, Any] = {}
    for keys, x in jax.tree.flatten_with_path(params)[0]:
        names = [str(key.key) for key in keys if hasattr(key, "key") and key.key != "value"]
        place = out
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = jnp.array(np.asarray(x))
    return out


def compare(name: str, rounds: int) -> dict[str, Any]:
    """One row: losses of 10 steps first, then milliseconds a step."""
    *sizes, steps = SIZES[name]
    trainer = trainer_of(*sizes)
    bare = Bare(nested(trainer.state.params))
    rows = trainer.config.train.global_batch_size
    source = batches(
        trainer.dataset.train, global_batch_size=rows, seed=0, start=0, rows=np.arange(rows)
    )
    data = [next(source) for _ in range(10)]
    losses = {
        "jaxtrain": [float(trainer.step(batch)["loss"]) for batch in data],
        "bare": [float(loss) for loss in bare.run(data, 10)],
    }
    apart = side_by_side.assert_equal_mathematics(losses, 1e-5)

    def milliseconds(run: Any) -> np.ndarray:
        """Of a step: on the clock, of all threads' processor time, of this thread's."""
        clocks = (time.perf_counter, time.process_time, time.thread_time)
        took = []
        for length in (steps, 3 * steps):
            begin = [clock() for clock in clocks]
            run(length)
            took.append([clock() - at for clock, at in zip(clocks, begin, strict=True)])
        return 1e3 * (np.array(took[1]) - np.array(took[0])) / (2 * steps)

    sides = {"jaxtrain": lambda n: trainer.train(steps=n), "bare": lambda n: bare.run(data, n)}
    for run in sides.values():
        run(steps)
    found: dict[str, list[np.ndarray]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            found[side].append(milliseconds(sides[side]))
    times = {side: np.array(of_side).T.tolist() for side, of_side in found.items()}
    more = (np.array(times["jaxtrain"][0]) - np.array(times["bare"][0])).tolist()
    return {
        "row": name,
        "losses_apart": apart,
        "rounds": rounds,
        "step_ms": {side: side_by_side.spread(of[0]) for side, of in times.items()},
        "cpu_ms": {side: float(np.median(of[1])) for side, of in times.items()},
        "main_thread_cpu_ms": {side: float(np.median(of[2])) for side, of in times.items()},
        "overhead_ms": side_by_side.spread(more),
        "overhead_share": float(np.median(more) / np.median(times["bare"][0])),
    }


def main() -> None:
    """Reads the command line, prints and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("overhead.json"))
    options = parser.parse_args()
    written = side_by_side.circumstances(["jax", "jaxlib", "flax", "optax", "numpy"])
    written["results"] = [compare(name, options.rounds) for name in SIZES]
    options.json.write_text(json.dumps(written, indent=1))
    Console(width=120).print(written)


if __name__ == "__main__":
    main()
