"""What of a model is trained, as a configuration says it: names by patterns, checked."""

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator

import jax
from flax import nnx

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.reader import configurable
from jaxtrain.parallel.sharding import is_variable
from jaxtrain.training.finetune.tuning import Tuning


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Which parameters a run trains; by default all of them.

    Attributes:
      freeze: patterns of parameters that stay as they are, by the names that `Trainer.table` gives:
        `('layers/*', 'token_embedding')`; `*` stands for any characters, slashes too. They have no
        gradient and no optimizer state.
    """

    freeze: tuple[str, ...] = ()


def refuse(
    settings: Finetune, names: Callable[[], Collection[str]], exchange: str
) -> Iterator[str]:
    """A sentence for each reason why a run cannot train so.

    Args:
      settings: what is trained.
      names: of the model's parameters; only asked for where something is not trained.
      exchange: the method by which replicas agree.
    """
    if settings == Finetune():
        return
    if exchange != "synchronous":
        yield (
            f"Finetune.freeze={settings.freeze!r} with Exchange.method={exchange!r}: replicas with "
            "parameters of their own train all of them; use Exchange.method='synchronous'"
        )
    known = names()
    for pattern in settings.freeze:
        if not matching([pattern], known):
            yield (
                f"Finetune.freeze: {pattern!r} matches no parameter{did_you_mean(pattern, known)}"
            )
    if len(matching(settings.freeze, known)) == len(known):
        yield (
            f"Finetune.freeze={settings.freeze!r} matches all {len(known)} parameters, and nothing "
            "is left to train; leave some of them out"
        )


def tuning_of(settings: Finetune, build: Callable[[jax.Array], nnx.Module]) -> Tuning:
    """What is trained of a model.

    Args:
      settings: which parameters are.
      build: key -> the model.

    Raises:
      UserError: a pattern matches none.
    """
    if settings == Finetune():
        return Tuning()
    names = names_of(nnx.state(nnx.eval_shape(lambda: build(jax.random.key(0))), nnx.Param))
    found = list(refuse(settings, lambda: names, "synchronous"))
    if found:
        raise UserError("\n".join(found))
    return Tuning(frozenset(matching(settings.freeze, names)))


def names_of(params: nnx.State) -> list[str]:
    """The names of a tree's variables, such as `layers/up`."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def matching(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Those of the names that one of the patterns matches."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
