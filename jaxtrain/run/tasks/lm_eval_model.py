"""Adapter for the lm-evaluation-harness (lm-eval).

lm-eval (EleutherAI, version 0.4.13) is an extra, `pip install 'jaxtrain[lm-eval]'`.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.data.tokenization.tokenizer import Tokenizer, with_special_tokens
from jaxtrain.models.model import token_model
from jaxtrain.run.generation import BATCH_SIZE
from jaxtrain.run.generation.answer import tokenizer_of
from jaxtrain.run.generation.decoding import Sampling
from jaxtrain.run.tasks.tasks import Pair, Score, encode_pair, scores
from jaxtrain.run.trainer import Trainer

_WRITTEN = 256  # default maximum tokens of a task's answer
_READ = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


def lm_eval_model(trainer: Trainer, *, batch_size: int = BATCH_SIZE) -> Any:
    """Return a model for `lm_eval.simple_evaluate(model=...)`.

    Args:
      trainer: of a trained language model of text, such as `Trainer(config, workdir,
        read_only=True)`.
      batch_size: texts that are scored at once.

    Raises:
      UserError: the model is not a language model, its data are not text, or lm-eval is not
        installed. Later requests raise it too: for an answer that does not fit into the context, or
          by
        unsupported generation settings.
    """
    try:
        base: Any = importlib.import_module("lm_eval.api.model").LM
        utils = importlib.import_module("lm_eval.utils")
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; run: pip install 'jaxtrain[lm-eval]'") from error
    train = trainer.config.train
    sizes, tokenizer = token_model(train.model), tokenizer_of(train, command="lm-eval")
    length = sizes.context_length

    def score(pairs: Sequence[Pair]) -> list[Score]:
        state = trainer.program.eval_state(trainer.state)
        return scores(trainer.program.setup, sizes, state, pairs, batch_size=batch_size)

    class OfRun(base):
        """The three requests of lm-eval, with its arguments and results."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            pairs = [
                encode_pair(tokenizer, context, continuation, length=length)
                for context, continuation in (request.args for request in requests)
            ]
            return [(score.log_likelihood, score.greedy) for score in score(pairs)]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            if tokenizer.end_of_text is None:
                raise UserError("a text of its own, and the tokenizer has no end-of-text token")
            found = []
            for request in requests:
                (text,) = request.args
                windows = utils.get_rolling_token_windows(
                    tokenizer.encode(text), tokenizer.end_of_text, length, 1
                )
                pairs = []
                for window in windows:
                    before, after = utils.make_disjoint_window(window)
                    pairs.append(
                        Pair(tokens=[*before, *after][:-1], continuation=after, truncated=False)
                    )
                found.append(sum(score.log_likelihood for score in score(pairs)))
            return found

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            # Requests of one task are similar: one batch per kind.
            kinds: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                kinds.setdefault(repr(request.args[1]), []).append(number)
            found = [""] * len(requests)
            for numbers in kinds.values():
                settings = requests[numbers[0]].args[1]
                limit, until, sampling = _parse_settings(settings, length=length)
                most = length - limit - len(with_special_tokens(tokenizer, ()))
                prompts = [_last(tokenizer, requests[number].args[0], most) for number in numbers]
                answers = trainer.answers(
                    prompts, max_new_tokens=limit, sampling=sampling, stop=until,
                    batch_size=batch_size,
                )  # fmt: skip
                for number, answer in zip(numbers, answers, strict=True):
                    found[number] = answer.text or ""
            return found

    return OfRun()


def _parse_settings(settings: Mapping[str, Any], *, length: int) -> tuple[int, list[str], Sampling]:
    """Return the greatest length of an answer, the strings that end it, and how its tokens are
    drawn."""
    for name in settings:
        if name not in _READ:
            raise UserError(
                f"lm-eval's generation_kwargs {name!r} is not read here"
                f"{did_you_mean(name, _READ)}; use some of {list(_READ)}"
            )
    limit, until = settings.get("max_gen_toks", _WRITTEN), settings.get("until") or []
    if not 1 <= limit < length:
        raise UserError(
            f"max_gen_toks={limit} leaves no room for a prompt in the model's context of {length} "
            f"tokens; use 1 to {length - 1}, by gen_kwargs"
        )
    draws = settings.get("do_sample", settings.get("temperature", 0) > 0)
    temperature = settings.get("temperature", 1.0) if draws else 0.0
    sampling = Sampling(
        temperature=temperature,
        top_k=settings.get("top_k") if draws else None,
        top_p=settings.get("top_p") if draws else None,
    )
    return limit, [until] if isinstance(until, str) else list(until), sampling


def _last(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return the text, or its last `most` tokens."""
    tokens = tokenizer.encode(text)
    return text if len(tokens) <= most else tokenizer.decode(tokens[-most:])
