"""Hugging Face `tokenizer.json` tokenizers, with the special tokens of the files next to them.

Exceptions and panics of the `tokenizers` library become messages.
"""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.key_table import validate_keys
from jaxtrain.config.untrusted import MalformedError, parse_json, read_bounded
from jaxtrain.data.tokenization.tokenizer import (
    Border,
    TextPiece,
    border_at,
    encode_texts,
    tokens_of,
    with_special_tokens,
)
from jaxtrain.data.tokenization.tokenizer_folder import TOKENIZER_KEYS, TokenizerFolder, read_folder

if TYPE_CHECKING:
    import tokenizers


_SHOWN = 300  # characters of the library's message


@contextlib.contextmanager
def library_errors(named: str) -> Iterator[None]:
    """Turn errors of the library into UserError, within the context.

    The library has no exception class: it raises a bare Exception, or pyo3's PanicException, which
    no module exports and which derives from BaseException, so that it would pass every handler.

    Args:
      named: the file, for messages.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}..."
        raise UserError(
            f"{named}: the installed tokenizers library cannot use it ({reason}); get the file "
            "again, or update: pip install -U tokenizers"
        ) from error


class Guarded:
    """Tokenizer of the library with `library_errors` around each method.

    Args:
      guarded: the tokenizer.
      named: the file, for messages.
    """

    def __init__(self, guarded: Any, named: str) -> None:
        vars(self).update(_guarded=guarded, _named=named)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._guarded, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            with library_errors(self._named):
                return found(*args, **kwargs)

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._guarded, name, value)


BATCH_CHARACTERS = 1 << 23

_MAX_VOCAB = 1 << 22  # the largest published vocabularies have a million tokens

# Used if the files next to a tokenizer.json name no end-of-text token.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class FileTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json`, with special tokens of the files next to it.

    Args:
      path: the file.
      end_of_text: the token that ends a document; None takes the folder's own (`eos_token` of
        tokenizer_config.json, or the first `eos_token_id` of the model), else the first of
        END_OF_TEXT_NAMES in the vocabulary, or none.
      add_special_tokens: whether special tokens are put around a text; None: the tokenizer's
        default; True: the default, or if it adds none, the beginning-of-text token that it names.
      section: the settings' class, for messages.

    Raises:
      UserError: the file cannot be read, is not a tokenizer.json, or has no such tokens.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        end_of_text: str | None = None,
        add_special_tokens: bool | None = None,
        section: str = "TextData",
    ) -> None:
        import tokenizers

        named = f"{section}.tokenizer = {str(path)!r}"
        _validate_folder(named, path)
        content = read_bounded(path, named=named)
        tree = _check_content(named, content)
        validate_keys(tree, TOKENIZER_KEYS, where=str(path))
        folder = read_folder(path, tree)
        with library_errors(named):
            tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._tokenizer = cast("tokenizers.Tokenizer", Guarded(tokenizer, named))
        # A file may set truncation and padding, which would lose or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        changes = _complete(self._tokenizer, folder)
        self.before, self.after = _special_tokens_around(self._tokenizer)
        own = self.before, self.after
        # Its offsets may leave out spaces.
        self._tokenizer.post_processor = None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # The largest id and not the count: some files skip ids.
        self.vocab_size = max(vocab.values(), default=0) + 1
        if self.vocab_size > _MAX_VOCAB:
            raise UserError(
                f"{named}: its largest id is {self.vocab_size - 1:,}; at most {_MAX_VOCAB - 1:,} "
                "can be used, since tables have a row for each"
            )
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.file_digest = self.digest = hashlib.sha256(content).hexdigest()
        if changes:
            self.digest = hashlib.sha256(content + json.dumps(changes).encode()).hexdigest()
        if end_of_text is not None and end_of_text not in vocab:
            raise UserError(
                f"{section}.end_of_text = {end_of_text!r}: {path} has no such token"
                f"{did_you_mean(end_of_text, _special_tokens(self._tokenizer))}"
            )
        self.end_of_text = (
            self._own_end(folder, vocab) if end_of_text is None else vocab[end_of_text]
        )
        if add_special_tokens is False:
            self.before = self.after = ()
        elif add_special_tokens and not (self.before or self.after):
            self.before = (self._own_begin(folder, vocab, f"{section}.add_special_tokens", path),)
        self.is_surrounded_otherwise = (self.before, self.after) != own
        self._special = dict(folder.special)

    def _own_end(self, folder: TokenizerFolder, vocab: Mapping[str, int]) -> int | None:
        """Return the end-of-text token of the folder or the vocabulary."""
        named = folder.special.get("eos_token")
        if named is not None:
            return vocab[named]
        special = self._tokenizer.get_added_tokens_decoder()
        for one in folder.ends:
            if one in special and special[one].special:
                return one
        return next((vocab[name] for name in END_OF_TEXT_NAMES if name in vocab), None)

    def _own_begin(
        self, folder: TokenizerFolder, vocab: Mapping[str, int], setting: str, path: AnyPath
    ) -> int:
        named = folder.special.get("bos_token")
        if named is None:
            raise UserError(
                f"{setting} = True: {path} puts none around a text, and no tokenizer_config.json "
                "next to it names a bos_token; leave it None"
            )
        return vocab[named]

    def special_names(self) -> dict[str, str]:
        """Special tokens as in tokenizer_config.json: the folder's, and the end and the start
        of a text.
        """
        names = dict(self._special)
        if self.end_of_text is not None:
            names["eos_token"] = str(self._tokenizer.id_to_token(self.end_of_text))
        if self.before:
            names.setdefault("bos_token", str(self._tokenizer.id_to_token(self.before[0])))
        return names

    def to_json(self) -> str:
        """Return a tokenizer.json that adds the same special tokens around a text."""
        import tokenizers

        name = self._tokenizer.id_to_token
        parts = [*map(name, self.before), "$A", *map(name, self.after)]
        template = tokenizers.processors.TemplateProcessing(
            single=parts,
            pair=[*parts, "$B:1"],
            special_tokens=[(str(name(one)), one) for one in {*self.before, *self.after}],
        )
        whole = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        whole.post_processor = template
        return whole.to_str()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_inside(self, text: str) -> list[int]:
        found = self._encode_after("\n", text) if self._puts_space else None
        return self.encode(text) if found is None else found

    @functools.cached_property
    def _puts_space(self) -> bool:
        return self._encode_after("\n", "a") != self.encode("a")

    def _encode_after(self, context: str, text: str) -> list[int] | None:
        """Return the token ids of a text after another; None if a token spans both."""
        whole = self._tokenizer.encode(context + text, add_special_tokens=False)
        number = border_at(whole.ids, whole.offsets, len(context))
        return None if number is None else whole.ids[number:]

    def encode_whole(self, text: str, at_most: int) -> tuple[list[int], bool]:
        """Return a text's ids with special tokens such as [CLS] and [SEP], and whether it was
        truncated to `at_most` tokens.
        """
        ids, room = self.encode(text), max(at_most - len(self.before) - len(self.after), 0)
        return with_special_tokens(self, ids[:room]), len(ids) > room

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, [begin for begin, _ in encoded.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, setting: str, name: str) -> int:
        """Return the id of a special token by its name, as in `Tokenizer`."""
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise UserError(
                f"{setting} = {name!r}: the tokenizer.json has no such token"
                f"{did_you_mean(name, _special_tokens(self._tokenizer))}"
            )
        return found

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        yield from encode_texts(texts, self.border, self.encode_pieces)

    def encode_pieces(self, pieces: Iterable[TextPiece]) -> Iterator[np.ndarray]:
        for batch in _batches(pieces):
            whole = [piece.text for piece in batch if piece.is_whole]
            found = iter(self._tokenizer.encode_batch_fast(whole, add_special_tokens=False))
            # With the offsets of the tokens, which take several times as long.
            longer = [p.before + p.text + p.after for p in batch if not p.is_whole]
            others = iter(self._tokenizer.encode_batch(longer, add_special_tokens=False))
            for piece in batch:
                if piece.is_whole:
                    yield np.asarray(next(found).ids, self.dtype)
                else:
                    one = next(others)
                    yield np.asarray(tokens_of(piece, one.ids, one.offsets), self.dtype)

    def border(self, left: str, right: str) -> Border | None:
        encoded = self._tokenizer.encode(left + right, add_special_tokens=False)
        number = border_at(encoded.ids, encoded.offsets, len(left))
        return None if number is None else (encoded.ids[number - 1], encoded.ids[number])


def _complete(tokenizer: "tokenizers.Tokenizer", folder: TokenizerFolder) -> list[Any]:
    """Complete a tokenizer.json with the folder's settings; return the changes."""
    import tokenizers

    changes: list[Any] = []
    for text, special in folder.more:
        if tokenizer.token_to_id(text) is None:
            tokenizer.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
            changes.append([text, special])
    if folder.split_special:
        tokenizer.encode_special_tokens = True
        changes.append("split_special_tokens")
    if folder.prefix is not None:
        before = tokenizer.normalizer, tokenizer.pre_tokenizer
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme=folder.prefix, split=False
        )
        if (tokenizer.normalizer, str(tokenizer.pre_tokenizer)) != (before[0], str(before[1])):
            changes.append(f"prefix {folder.prefix}")
    return changes


def _special_tokens_around(
    tokenizer: "tokenizers.Tokenizer",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer's post-processor adds before and after a text."""
    around = tokenizer.post_processor
    if around is None or not around.num_special_tokens_to_add(False):
        return (), ()
    # Any text with a token shows where they are added.
    vocab, added = tokenizer.get_vocab(with_added_tokens=False), _special_tokens(tokenizer)
    for probe in itertools.chain("a0", sorted(vocab.keys() - set(added))[:1000]):
        own = tokenizer.encode(probe, add_special_tokens=False).ids
        if own:
            whole = tokenizer.encode(probe).ids
            starts = range(len(whole) - len(own) + 1)
            begin = next((at for at in starts if whole[at : at + len(own)] == own), None)
            if begin is None:
                continue
            return tuple(whole[:begin]), tuple(whole[begin + len(own) :])
    return (), ()


def _batches(texts: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _validate_folder(named: str, path: AnyPath) -> None:
    if path.is_dir():
        inside = path / "tokenizer.json"
        hint = f"; did you mean {str(inside)!r}?" if inside.is_file() else ""
        raise UserError(f"{named} is a folder, not a file{hint}")


def _check_content(named: str, content: bytes) -> dict[str, Any]:
    try:
        tree = parse_json(content)
    except MalformedError:
        tree = None
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not {"type", "vocab"} <= model.keys():
        raise UserError(
            f"{named} is not a Hugging Face tokenizer.json "
            "(JSON with a model and its vocab); it takes 'byte' or the path of such a file"
        )
    assert tree is not None, "rejected above"
    return tree


def _special_tokens(tokenizer: "tokenizers.Tokenizer") -> list[str]:
    return [str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
