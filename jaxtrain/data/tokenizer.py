"""Text to token ids and back: bytes, or a Hugging Face tokenizer.json file."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxtrain.config.buckets import Place
from jaxtrain.config.errors import UserError, did_you_mean
from jaxtrain.config.files import refused_path

if TYPE_CHECKING:
    import tokenizers

# Longer documents are encoded in pieces cut at line ends, so that memory stays bounded.
PIECE_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 1 << 23

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      end_of_text: the id that ends a document, or None.
      digest: sha256 hex of what defines the ids.
      dtype: the smallest unsigned numpy dtype that holds every id.
    """

    vocab_size: int
    end_of_text: int | None
    digest: str
    dtype: np.dtype

    def encode(self, text: str) -> list[int]: ...

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """The ids, and of each the place of its first character in the text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token(self, setting: str, name: str) -> int:
        """The id of the token that a setting names.

        Raises:
          UserError: there is none of that name.
        """
        ...

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text in turn, as arrays of `dtype`, without the end-of-text token."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8.

    The vocabulary is 256 and not 257, so that it divides over a tensor axis: byte 0, which text
    does not use, doubles as the end of a document.
    """

    vocab_size = 256
    end_of_text: int | None = 0
    digest = hashlib.sha256(b"byte, end of text 0").hexdigest()
    dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_whole(self, text: str, at_most: int) -> tuple[list[int], bool]:
        """As of `FileTokenizer`: nothing is put around."""
        ids = self.encode(text)
        return ids[:at_most], len(ids) > at_most

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        sizes = [len(character.encode("utf-8")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are not UTF-8 and ids over 255 come out as U+FFFD."""
        # 0xFF appears nowhere in UTF-8, so it stands for every id that is no byte.
        return bytes(min(int(token), 0xFF) for token in ids).decode("utf-8", errors="replace")

    def token(self, setting: str, name: str) -> int:
        """As in Tokenizer: a character of one byte."""
        ids = self.encode(name)
        if len(ids) != 1 or ids[0] == self.end_of_text:
            raise UserError(
                f"{setting} = {name!r}: a token of the byte tokenizer is one character of one "
                "byte, such as '\\x01'; or set TextData.tokenizer to a tokenizer.json that has it"
            )
        return ids[0]

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode("utf-8"), self.dtype)


class FileTokenizer:
    """A Hugging Face `tokenizer.json`.

    Args:
      path: the file.
      end_of_text: the token that ends a document; None takes the first of END_OF_TEXT_NAMES that
        the vocabulary has, and does without where it has none.
      section: whose settings these are, for messages.

    Raises:
      UserError: the file cannot be read, is no tokenizer.json, or has no such end-of-text token.
    """

    def __init__(
        self, path: Place, *, end_of_text: str | None = None, section: str = "TextData"
    ) -> None:
        import tokenizers

        named = f"{section}.tokenizer = {str(path)!r}"
        with refused_path(named, needs="use a tokenizer.json that can be read"):
            content = path.read_bytes() if path.is_file() else b""
        _check_content(named, path, content)
        self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # A file may ask for cutting and padding, which would lose or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # It adds special tokens, which few ask for, and may leave spaces out of the places.
        self._around = self._tokenizer.post_processor
        self._tokenizer.post_processor = None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # The largest id and not the count: files with holes in their ids exist.
        self.vocab_size = max(vocab.values()) + 1
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.digest = hashlib.sha256(content).hexdigest()
        if end_of_text is None:
            end_of_text = next((name for name in END_OF_TEXT_NAMES if name in vocab), None)
        elif end_of_text not in vocab:
            raise UserError(
                f"{section}.end_of_text = {end_of_text!r}: {path} has no such token"
                f"{did_you_mean(end_of_text, _special_tokens(self._tokenizer))}"
            )
        self.end_of_text = None if end_of_text is None else vocab[end_of_text]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_whole(self, text: str, at_most: int) -> tuple[list[int], bool]:
        """The ids of a text with those that the file puts around it, such as [CLS] and [SEP], and
        whether it was cut: of what is longer than so many tokens the rest is left out."""
        encoded, around = self._tokenizer.encode(text, add_special_tokens=False), self._around
        own = 0 if around is None else around.num_special_tokens_to_add(False)
        room = max(at_most - own, 0)
        cut = len(encoded.ids) > room
        encoded.truncate(room)
        return (encoded if around is None else around.process(encoded)).ids, cut

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, [begin for begin, _ in encoded.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def token(self, setting: str, name: str) -> int:
        """As in Tokenizer."""
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise UserError(
                f"{setting} = {name!r}: the tokenizer.json has no such token"
                f"{did_you_mean(name, _special_tokens(self._tokenizer))}"
            )
        return found

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for batch in _batches(texts):
            pieces = [split_at_lines(text) for text in batch]
            encoded = iter(
                self._tokenizer.encode_batch_fast(
                    [piece for of_text in pieces for piece in of_text], add_special_tokens=False
                )
            )
            for of_text in pieces:
                yield np.concatenate([np.asarray(next(encoded).ids, self.dtype) for _ in of_text])


def split_at_lines(text: str, size: int = PIECE_CHARACTERS) -> list[str]:
    """`text` in pieces of about `size` characters that join to it again.

    A piece begins at a line that begins with no white space: there byte-pair tokenizers with
    GPT-2's kind of word pattern cut anyway, so the ids are those of the whole text.
    """
    pieces, begin = [], 0
    while len(text) - begin > size:
        end = text.find("\n", begin + size)
        while end != -1 and end + 1 < len(text) and text[end + 1].isspace():
            end = text.find("\n", end + 1)
        if end == -1 or end + 1 >= len(text):
            break
        pieces.append(text[begin : end + 1])
        begin = end + 1
    return [*pieces, text[begin:]]


def open_tokenizer(
    path_or_byte: str, *, end_of_text: str | None, path: Place | None, section: str = "TextData"
) -> ByteTokenizer | FileTokenizer:
    """The tokenizer that a setting names; `path` is where its file was found."""
    if path is None:
        assert path_or_byte == "byte", path_or_byte
        if end_of_text is not None:
            raise UserError(
                f"{section}.end_of_text = {end_of_text!r}: the byte tokenizer ends documents with "
                f"byte 0; leave it None, or set {section}.tokenizer to a tokenizer.json file"
            )
        return ByteTokenizer()
    return FileTokenizer(path, end_of_text=end_of_text, section=section)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_content(named: str, path: Place, content: bytes) -> None:
    if path.is_dir():
        inside = path / "tokenizer.json"
        hint = f"; did you mean {str(inside)!r}?" if inside.is_file() else ""
        raise UserError(f"{named} is a folder, not a file{hint}")
    try:
        tree = json.loads(content)
    except ValueError:  # covers text that is not UTF-8 and text that is not JSON
        tree = None
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not {"type", "vocab"} <= model.keys():
        raise UserError(
            f"{named} is not a Hugging Face tokenizer.json "
            "(JSON with a model and its vocab); it takes 'byte' or the path of such a file"
        )


def _special_tokens(tokenizer: "tokenizers.Tokenizer") -> list[str]:
    return [str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
