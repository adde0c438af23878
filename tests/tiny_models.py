"""Tiny GPTs and Llamas that several tests share, and their parameters by name."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.transformers.gpt import GPT
from jaxtrain.models.transformers.llama import Llama
from jaxtrain.parallel.sharding import is_variable

V, D, N, K, F, C = 61, 32, 4, 2, 48, 24
LLAMA = functools.partial(
    Llama, vocab_size=V, num_layers=4, embed_dim=D, num_heads=N, num_kv_heads=K, mlp_dim=F,
    context_length=C, rope_theta=10000.0,
)  # fmt: skip
MODELS = {
    "gpt": GPT(vocab_size=V, num_layers=4, embed_dim=D, num_heads=N, context_length=C),
    "llama": LLAMA(),
    "llama-tied": LLAMA(tie_embeddings=True),
    "llama-scaled": LLAMA(rope_scaling=8.0, rope_original_context_length=12),
    "llama-window": LLAMA(sliding_window=3),
}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@functools.cache
def split(name: str) -> tuple[Any, Any]:
    """Structure and parameters, drawn wide enough that no term is lost in the others."""
    abstract = nnx.eval_shape(lambda: MODELS[name].build(jax.random.key(0)))
    structure, shapes = nnx.split(abstract, nnx.Param)
    rng = np.random.default_rng(0)

    def draw(path, variable):  # noqa: ANN001, ANN202
        middle = 1.0 if name_of(path).endswith("scale") else 0.0
        value = middle + 0.2 * rng.standard_normal(variable.get_value().shape, np.float32)
        return variable.replace(jnp.asarray(value, jnp.float32))

    return structure, jax.tree_util.tree_map_with_path(draw, shapes, is_leaf=is_variable)


def parameters(sizes: Any) -> dict[str, Any]:
    """Every parameter's variable by its path; shapes only, no array is made."""
    shapes = nnx.state(nnx.eval_shape(lambda: sizes.build(jax.random.key(0))), nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(shapes, is_leaf=is_variable)
    return {name_of(path): variable for path, variable in leaves}


def count_parameters(sizes: Any) -> int:
    """Numbers of all parameters; no array is made."""
    return sum(variable.get_value().size for variable in parameters(sizes).values())


def places(B: int, T: int) -> np.ndarray:
    return np.tile(np.arange(T, dtype=np.int32), (B, 1))


def some_tokens(B: int, T: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
