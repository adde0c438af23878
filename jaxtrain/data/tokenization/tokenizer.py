"""Tokenizers: interface, byte tokenizer, and the choice between it and a tokenizer.json."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer
    from jaxtrain.data.tokenization.long_texts import Border, TextPiece


class Tokenizer(Protocol):
    """Interface of tokenizers: text to ids and back.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      end_of_text: the id that ends a document, or None.
      before, after: special tokens that are put around a text, such as Llama's begin-of-text token.
      digest: sha256 hex of the definition of the ids.
      file_digest: of the file alone, the digest in stores of earlier versions.
      dtype: the smallest unsigned numpy dtype that holds every id.
    """

    vocab_size: int
    end_of_text: int | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    digest: str
    file_digest: str
    dtype: np.dtype

    def encode(self, text: str) -> list[int]:
        """Return the token ids, without special tokens around them."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text, without the space that some
        tokenizers prefix.
        """
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids, and the character offset of each in the text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token(self, setting: str, name: str) -> int:
        """Return the id of the token that a setting names.

        Raises:
          UserError: there is none of that name.
        """
        ...

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the token ids of each text, as arrays of `dtype`, without special tokens around
        them.
        """
        ...

    def encode_pieces(self, pieces: "Iterable[TextPiece]") -> Iterator[np.ndarray]:
        """Yield the token ids of each piece of texts, as `encode_documents` does."""
        ...

    def border(self, left: str, right: str) -> "Border | None":
        """Return the tokens on either side of the border of two texts encoded as one; None if a
        token crosses it.
        """
        ...


def with_special_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """Return the tokens of a prompt: a text's with the special tokens around it."""
    return [*tokenizer.before, *ids, *tokenizer.after]


def closing(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a document: special tokens after a text, and end-of-text."""
    end, after = tokenizer.end_of_text, tokenizer.after
    return after if end is None or after[-1:] == (end,) else (*after, end)


def no_end_of_text(section: str, tokenizer: str) -> str:
    """Return the message for a tokenizer without a known end-of-text token."""
    return (
        f"No token is known to end a text ({section}.tokenizer = {tokenizer!r}): documents are "
        "concatenated without a separator, and answers end at their maximum length; name one "
        f"in {section}.end_of_text"
    )


def special_tokens_header(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """Return the entry for special tokens in the description of a run's data.

    It is empty without special tokens, so that descriptions of earlier versions stay the same.
    """
    around = [list(tokenizer.before), list(tokenizer.after)]
    return {"special_tokens": around} if any(around) else {}


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: one token per byte.

    The vocabulary is 256 and not 257, so that it divides over a tensor axis: byte 0, which text
    does not use, doubles as the end of a document.
    """

    vocab_size = 256
    end_of_text: int | None = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    digest = hashlib.sha256(b"byte, end of text 0").hexdigest()
    file_digest = digest
    dtype = np.dtype(np.uint8)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_whole(self, text: str, at_most: int) -> tuple[list[int], bool]:
        """Return the ids as in `FileTokenizer`; no special tokens are added."""
        ids = self.encode(text)
        return ids[:at_most], len(ids) > at_most

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        sizes = [len(character.encode("utf-8")) for character in text]
        return self.encode(text), np.repeat(np.arange(len(text)), sizes).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; invalid UTF-8 and ids over 255 become U+FFFD."""
        # 0xFF appears nowhere in UTF-8, so it represents every id that is not a byte.
        return bytes(min(int(token), 0xFF) for token in ids).decode("utf-8", errors="replace")

    def token(self, setting: str, name: str) -> int:
        """Return the id of a character of one byte, as in `Tokenizer`."""
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

    def encode_pieces(self, pieces: "Iterable[TextPiece]") -> Iterator[np.ndarray]:
        return self.encode_documents(piece.text for piece in pieces)

    def border(self, left: str, right: str) -> "Border | None":
        return left.encode("utf-8")[-1], right.encode("utf-8")[0]


def open_tokenizer(
    path_or_byte: str,
    *,
    end_of_text: str | None,
    path: AnyPath | None,
    add_special_tokens: bool | None = None,
    section: str = "TextData",
) -> "ByteTokenizer | FileTokenizer":
    """Open the tokenizer that a setting names; `path` is where its file was found."""
    if path is None:
        assert path_or_byte == "byte", path_or_byte
        if end_of_text is not None:
            raise UserError(
                f"{section}.end_of_text = {end_of_text!r}: the byte tokenizer ends documents with "
                f"byte 0; leave it None, or set {section}.tokenizer to a tokenizer.json file"
            )
        if add_special_tokens:
            raise UserError(
                f"{section}.add_special_tokens = True: the byte tokenizer has none but the end of "
                f"a document; leave it None, or set {section}.tokenizer to a tokenizer.json file"
            )
        return ByteTokenizer()
    # Imported here: the byte tokenizer does not need it.
    from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer

    return FileTokenizer(
        path, end_of_text=end_of_text, add_special_tokens=add_special_tokens, section=section
    )
