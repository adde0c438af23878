"""Append-only files of whole records that survive a full disk."""

from pathlib import Path

from jaxtrain.config.disks import full_disk, writing


class Appended:
    """A file that pieces are appended to, each of them whole or, for now, not at all.

    A save in progress may fill a disk for a while, and is taken away where it fails: what found no
    room waits in memory for the next piece.

    Args:
      file: made where there is none.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with writing(file):
            self._stream = file.open("ab", buffering=0)
        self._end = self._stream.tell()
        self._waiting = b""

    @property
    def closed(self) -> bool:
        """Whether it takes no more pieces."""
        return self._stream.closed

    def append(self, piece: bytes) -> None:
        """Appends what waits and a piece; keeps them where the disk is full."""
        self._waiting += piece
        try:
            self._write()
        except OSError as error:
            if full_disk(error) is None:
                raise

    def close(self) -> None:
        """Appends what waits.

        Raises:
          FullDiskError: there is still no room for it; the pieces before it are whole.
        """
        try:
            with writing(self._file):
                self._write()
        finally:
            self._stream.close()

    def _write(self) -> None:
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            self._stream.truncate(self._end)
            raise
        self._end += len(self._waiting)
        self._waiting = b""
