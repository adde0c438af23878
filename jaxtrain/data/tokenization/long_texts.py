"""Tokenization of long texts in pieces with bounded memory, equal to the whole text's tokens.

A piece is encoded with some of the text before and after it, and only the tokens that begin in it
are kept: tokens that a tokenizer adds at a text's beginning or end, such as SentencePiece's
space, are not kept at borders. A border is where a token ends and another begins. Both pieces have
to yield the same two tokens there, from which it follows for byte-pair encodings that no token of
the whole text crosses it: a sequence of tokens is the encoding of its text if each two neighbors
are.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxtrain.config.errors import UserError

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
