"""Event files are those of TensorBoard: messages and checksums byte by byte, and whole files."""

import math
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from jaxtrain.run.metrics.files import EventFile, event, masked_checksum, summary

VALUES = {
    "loss": 2.75, "grad_norm": 0.0, "learning_rate": 1e-45, "rate": -3.0, "größe": math.pi,
    "eval_perplexity": math.inf, "a" * 300: 1.0,
}  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 127, 128, 300, 2**14, 2**31, 2**40])
def test_an_event_has_the_bytes_that_protobuf_gives_it(step):
    values = [Summary.Value(tag=name, simple_value=value) for name, value in VALUES.items()]
    theirs = Event(wall_time=1.8e9 + 1 / 3, step=step, summary=Summary(value=values))
    assert event(1.8e9 + 1 / 3, step, summary(VALUES)) == theirs.SerializeToString()


def test_what_no_float32_holds_is_infinite_and_nan_stays():
    found = Event.FromString(event(1.0, 1, summary({"large": -1e300, "none": math.nan})))
    large, none = (value.simple_value for value in found.summary.value)
    assert large == -math.inf
    assert math.isnan(none)


@pytest.mark.parametrize("content", [b"", b"a", bytes(32), bytes(range(256)) * 3])
def test_the_checksum_is_that_of_records(content):
    assert masked_checksum(content) == masked_crc32c(content)


def test_the_checksum_is_crc_32c():
    # RFC 3720, appendix B.4: 32 bytes of 0 have aa 36 91 8a.
    masked = masked_checksum(bytes(32))
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    checksum = ((rotated << 15) | (rotated >> 17)) & 0xFFFFFFFF
    assert checksum.to_bytes(4, "little").hex() == "aa36918a"


@pytest.mark.parametrize("first_step", [0, 6])
def test_a_file_is_records_with_their_checksums(tmp_path, first_step):
    file = EventFile(tmp_path, first_step)
    file.write(first_step + 1, {"loss": 1.5})
    file.close()
    (path,) = tmp_path.iterdir()
    data, events = path.read_bytes(), []
    while data:
        (length, of_length), content = struct.unpack("<QI", data[:12]), data[12:]
        assert of_length == masked_crc32c(data[:8])
        content, (of_content,) = content[:length], struct.unpack("<I", content[length : length + 4])
        assert of_content == masked_crc32c(content)
        events.append(Event.FromString(content))
        data = data[12 + length + 4 :]
    version, start, scalars = events
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START
    assert start.step == (7 if first_step else 0)
    assert [(value.tag, value.simple_value) for value in scalars.summary.value] == [("loss", 1.5)]
