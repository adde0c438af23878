"""Restrictions of int8 and float8 matmuls: models, platforms and chips."""

from collections.abc import Iterator

# Those that products with experts' weights have a form for; the others are rejected.
_OF_EXPERTS = ("compute", "float8")

# Words in the `jax.Device.device_kind` of what multiplies a format faster than bfloat16: NVIDIA's
# data sheets (float8 from compute capability 8.9 on; int8 from Ampere on, but for Blackwell Ultra,
# which has next to no int8); for TPUs the sources in `planning.hardware`.
_FASTER = {
    "float8": {
        "H20", "H100", "H200", "GH200", "B100", "B200", "B300", "GB200", "GB300", "L4", "L40",
        "L40S", "TPU7x",
    },
    "int8": {
        "A10", "A30", "A40", "A100", "H20", "H100", "H200", "GH200", "B100", "B200", "GB200", "L4",
        "L40", "L40S", "v5", "v5e", "v5p", "v6", "v6e",
    },
}  # fmt: skip
_EXAMPLES = {
    "float8": "H100, H200, B200, L40 and TPU7x",
    "int8": "TPU v5e, v5p and v6e, A100, H100, H200, B200 and L40",
}


def validate(
    matmul: str,
    *,
    platform: str | None,
    device_kind: str | None,
    model: str,
    experts: bool,
    recurrent: bool,
) -> Iterator[str]:
    """A sentence for each reason why products cannot be computed as `matmul` says.

    Args:
      matmul: Precision.matmul.
      platform: 'cpu', 'gpu' or 'tpu', None where it is not known; a CPU computes the same numbers,
        for tests and `verify`.
      device_kind: what JAX calls the device; None where it does not matter.
      model: the model's name, for the message.
      experts: whether it has experts.
      recurrent: whether its layers carry a state from place to place.
    """
    if matmul == "compute":
        return
    setting, way_out = f"Precision.matmul={matmul!r}", "use Precision.matmul='compute'"
    if experts and matmul not in _OF_EXPERTS:
        yield (f"{setting} for {model}: experts' grouped products have no {matmul} form; {way_out}")
    if recurrent:
        yield (
            f"{setting} for {model}: the product at each place of a recurrent layer "
            f"has no {matmul} form; {way_out}"
        )
    if platform == "cpu" or device_kind is None:
        return
    if not _FASTER[matmul] & set(device_kind.replace("-", " ").split()):
        yield (
            f"{setting} on {device_kind!r}, which is not known to multiply {matmul} faster than "
            f"bfloat16 ({_EXAMPLES[matmul]} are); {way_out}"
        )
