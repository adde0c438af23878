"""Sentinel tokens of span corruption (T5)."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxtrain.data.tokenization.long_texts import Border, TextPiece
from jaxtrain.data.tokenization.tokenizer import Tokenizer

NAME = "<extra_id_{}>"  # of the first 0, as T5's tokenizer calls them
_WRITTEN = re.compile(re.escape(NAME).replace(r"\{\}", r"(\d+)"))


class WithSentinels:
    """A tokenizer with sentinels behind its vocabulary, the first with the highest id, as T5's."""

    def __init__(self, text: Tokenizer, count: int) -> None:
        """Makes no token yet.

        Args:
          text: the tokenizer of all other text.
          count: sentinels.
        """
        self.text, self.count = text, count
        self.vocab_size, self.end_of_text = text.vocab_size + count, text.end_of_text
        self.before, self.after = text.before, text.after
        self.digest = hashlib.sha256(f"{text.digest} {count} sentinels".encode()).hexdigest()
        self.file_digest = self.digest
        self.dtype = np.min_scalar_type(self.vocab_size - 1)

    def sentinel(self, number: int) -> int:
        """The id that stands for span `number` of a row, counted from 0."""
        return self.vocab_size - 1 - number

    def encode(self, text: str) -> list[int]:
        """The ids; where the text has a sentinel's name, the sentinel's."""
        return self.encode_with_places(text)[0]

    def encode_inside(self, text: str) -> list[int]:
        """As in Tokenizer."""
        return self.encode(text)

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """As in Tokenizer."""
        ids, places, begin = list[int](), list[int](), 0
        for found in [*self._name(text), None]:
            end = len(text) if found is None else found.start()
            more, of_more = self.text.encode_with_places(text[begin:end])
            ids += more
            places += [begin + place for place in of_more]
            if found is not None:
                ids.append(self.sentinel(int(found[1])))
                places.append(found.start())
                begin = found.end()
        return ids, places

    def _name(self, text: str) -> Iterator[re.Match[str]]:
        return (found for found in _WRITTEN.finditer(text) if int(found[1]) < self.count)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with sentinels by their names."""
        parts, text = list[str](), list[int]()
        for one in map(int, ids):
            if one < self.text.vocab_size:
                text.append(one)
                continue
            parts += [self.text.decode(text), NAME.format(self.vocab_size - 1 - one)]
            text = []
        return "".join([*parts, self.text.decode(text)])

    def token(self, setting: str, name: str) -> int:
        """As in Tokenizer."""
        found = _WRITTEN.fullmatch(name)
        if found is not None and int(found[1]) < self.count:
            return self.sentinel(int(found[1]))
        return self.text.token(setting, name)

    def encode_documents(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """As in Tokenizer."""
        for text in texts:
            yield np.asarray(self.encode(text), self.dtype)

    def encode_pieces(self, pieces: Iterable[TextPiece]) -> Iterator[np.ndarray]:
        """As in Tokenizer, of whole texts: there is no border in others."""
        return self.encode_documents(piece.text for piece in pieces)

    def border(self, left: str, right: str) -> Border | None:
        """As in Tokenizer: none is known."""
        del left, right
        return None
