"""Fill-mask: prediction of `[MASK]` tokens in texts."""

from collections.abc import Sequence
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.data.batch import Batch
from jaxtrain.data.tokenization.tokenizer import Tokenizer
from jaxtrain.models.model import TokenModel
from jaxtrain.run.inference.texts import row_of, texts_of

MASK = "[MASK]"


def hidden_tokens(
    given: Sequence[Any], model: TokenModel, tokenizer: Tokenizer
) -> tuple[list[Batch], list[str], list[tuple[int, int]]]:
    """A row of each text, what each hidden token is called, and its row and its place there.

    Args:
      given: texts, or .txt files with one in each.
      model: that predicts them.
      tokenizer: of the run.

    Raises:
      UserError: a text hides nothing, or is longer than the model's context.
    """
    mask = _mask(model, tokenizer)
    texts, called, places = list[list[int]](), list[str](), list[tuple[int, int]]()
    for text in texts_of(given, model):
        first, *others = (tokenizer.encode(piece) for piece in text.split(MASK))
        ids, of_text = [*tokenizer.before, *first], list[int]()
        for piece in others:
            of_text.append(len(ids))
            ids += [mask, *piece]
        ids += tokenizer.after
        if not of_text:
            raise UserError(
                f"predict: {type(model).__name__} predicts masked tokens; write {MASK} where one "
                f"is, such as 'the {MASK} sat'"
            )
        if len(ids) > model.context_length:
            raise UserError(
                f"predict: a text has {len(ids)} tokens, more than "
                f"{type(model).__name__}.context_length={model.context_length}; give a shorter one"
            )
        called += [
            text if len(of_text) == 1 else f"{text}, {MASK} {number}"
            for number in range(1, len(of_text) + 1)
        ]
        places += [(len(texts), place) for place in of_text]
        texts.append(ids)
    length = max(map(len, texts), default=0)
    return [row_of(ids, length) for ids in texts], called, places


def token_names(model: TokenModel, tokenizer: Tokenizer) -> list[str]:
    """Return every token of the vocabulary as it is printed: its text in quotes, which show
    spaces."""
    has = range(min(tokenizer.vocab_size, model.vocab_size))
    none = range(len(has), model.vocab_size)
    return [repr(tokenizer.decode([id_])) for id_ in has] + [f"token {id_}" for id_ in none]


def _mask(model: TokenModel, tokenizer: Tokenizer) -> int:
    """The last token, as in training; of a model from elsewhere, which has no row beside its
    tokenizer's tokens, the one that the tokenizer names."""
    if tokenizer.vocab_size < model.vocab_size:
        return model.vocab_size - 1
    for name in (MASK, "<mask>"):
        try:
            return tokenizer.token("the mask's token", name)
        except UserError:
            continue
    raise UserError(
        f"predict: {type(model).__name__}.vocab_size={model.vocab_size} has no token beside the "
        f"tokenizer's, and the tokenizer has no {MASK} and no <mask>: there are no masks to predict"
    )
