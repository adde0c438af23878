"""Tokenizers: interface, byte tokenizer, and the choice between it and a tokenizer.json."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxtrain.config.buckets import AnyPath
from jaxtrain.config.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.data.tokenization.file_tokenizer import FileTokenizer


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


# -- long texts in pieces with bounded memory, equal to the whole text's tokens --------------------
# A piece is encoded with some of the text before and after it, and only the tokens that begin in it
# are kept: tokens that a tokenizer adds at a text's beginning or end, such as SentencePiece's
# space, are not kept at borders. A border is where a token ends and another begins. Both pieces
# have to yield the same two tokens there, from which it follows for byte-pair encodings that no
# token of the whole text crosses it: a sequence of tokens is the encoding of its text if each two
# neighbors are.

PIECE_CHARACTERS = 1 << 20
AROUND = 1 << 10  # characters before and after a piece that its encoding sees
_TRIES = 100  # line starts that are tried as a border, before a text is not cut

Border = tuple[int, int]  # the tokens before and after a border
FindBorder = Callable[[str, str], Border | None]


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Part of a text.

    Attributes:
      text: the part.
      before, after: some of the text around it.
      begins, ends: the tokens at its borders; None at the start or end of the text.
    """

    text: str
    before: str = ""
    after: str = ""
    begins: Border | None = None
    ends: Border | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole text."""
        return self.begins is None and self.ends is None


def cut(
    parts: Iterable[str],
    border: FindBorder,
    *,
    size: int | None = None,
    around: int | None = None,
) -> Iterator[TextPiece]:
    """Cut a text into pieces that begin at lines; at least one, which may be empty.

    Args:
      parts: the text, in parts of any size.
      border: the tokens at the border of two texts, as in `Tokenizer.border`.
      size: approximate characters of a piece; None: PIECE_CHARACTERS.
      around: characters of context; None: AROUND.
    """
    size, around = size or PIECE_CHARACTERS, around or AROUND
    held, before, begins = "", "", None
    position, tries = size, 0  # where the next line is searched; failed attempts
    chunks = (part[at : at + size] for part in parts for at in range(0, len(part), size))
    for chunk in chunks:
        held += chunk
        while len(held) > position + around:
            found = _line_begin(held, position, len(held) - around)
            if found is None:
                position = max(position, len(held) - around)
                break
            left = (before + held[max(found - around, 0) : found])[-around:]
            ends = border(left, held[found : found + around]) if "\n" in left[:-1] else None
            if ends is None:
                position, tries = found + 1, tries + 1
                if tries == _TRIES:
                    rest = "".join(itertools.chain([held], chunks))
                    yield TextPiece(rest, before, "", begins, None)
                    return
                continue
            yield TextPiece(held[:found], before, held[found : found + around], begins, ends)
            before, begins, held, position, tries = left, ends, held[found:], size, 0
    yield TextPiece(held, before, "", begins, None)


def border_at(ids: Sequence[int], spans: Sequence[tuple[int, int]], character: int) -> int | None:
    """Return the index of the first token after a border that no token crosses, with tokens on
    either side; else None.

    Args:
      ids: of a text.
      spans: the first character of each token, and the one after its last.
      character: the border is before it.
    """
    begins_ends = np.array(spans, np.int64).reshape(-1, 2)
    number = int(np.searchsorted(begins_ends[:, 0], character))
    is_border = 0 < number < len(ids)
    is_border = is_border and bool((begins_ends[:number, 1] <= character).all())
    is_border = is_border and bool((begins_ends[number:, 0] >= character).all())
    return number if is_border else None


def tokens_of(
    piece: TextPiece, ids: Sequence[int], spans: Sequence[tuple[int, int]]
) -> Sequence[int]:
    """Return the tokens of a piece, from those of the piece with the text around it.

    Raises:
      UserError: the tokens at a border differ from those where it was cut.
    """
    begin = len(piece.before)
    first = _check(piece.begins, ids, spans, begin)
    last = _check(piece.ends, ids, spans, begin + len(piece.text))
    return ids[0 if first is None else first : len(ids) if last is None else last]


def encode_texts(
    texts: Iterable[str],
    border: FindBorder,
    encode_pieces: Callable[[Iterable[TextPiece]], Iterator[np.ndarray]],
) -> Iterator[np.ndarray]:
    """Yield the token ids of each text in order; long ones are encoded in pieces."""
    to_encode, counted = itertools.tee([piece for piece in cut([text], border)] for text in texts)
    encoded = encode_pieces(piece for pieces in to_encode for piece in pieces)
    for pieces in counted:
        yield np.concatenate([next(encoded) for _ in pieces])


def _line_begin(text: str, begin: int, end: int) -> int | None:
    """Return the start of the first line between `begin` and `end` with no white space before its
    line break or at its start.
    """
    found = text.find("\n", begin - 1, end - 1)
    while found != -1:
        if not text[found + 1].isspace() and found and not text[found - 1].isspace():
            return found + 1
        found = text.find("\n", found + 1, end - 1)
    return None


def _check(
    border: Border | None,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    character: int,
) -> int | None:
    if border is None:
        return None
    number = border_at(ids, spans, character)
    if number is None or (ids[number - 1], ids[number]) != border:
        raise UserError(
            "a document is too long to be tokenized at once, and its tokenizer reads a line in "
            "the middle of it in two ways; split it into several documents"
        )
    return number
