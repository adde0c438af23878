"""Standard output that is closed under a run: a pipe nobody reads, a terminal that is gone."""

import io
import os
import pty

import pytest

from jaxtrain.run.show.progress import Output, terminal


@pytest.fixture(params=["pipe", "terminal"])
def ends(request):
    """The end that reads and a stream to write to it."""
    reader, writer = os.pipe() if request.param == "pipe" else pty.openpty()
    stream = os.fdopen(writer, "w")
    yield request.param, reader, stream
    stream.close()


def test_what_is_written_after_the_end_goes_nowhere_and_is_told_once(ends):
    kind, reader, stream = ends
    output = Output(stream, "a closed pipe")
    told = []
    output.when_closed(told.append)
    console = terminal(output)
    console.print("read")
    assert os.read(reader, 100).strip() == b"read"
    assert told == []
    os.close(reader)
    console.print("lost")
    console.print("lost too")
    assert told == [f"a closed {kind}"]
    late = []
    output.when_closed(late.append)
    assert late == told


def test_a_full_disk_is_no_closed_output():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match="No space left"):
        Output(Full(), "a closed pipe").write("lost")
