"""Published failure rates of accelerators and their MTBF, per 1,000 device-days."""

import dataclasses
import statistics

_HOURS = 24 * 1000  # device-hours of 1,000 device-days


@dataclasses.dataclass(frozen=True)
class FailureRate:
    """One published failure rate.

    Attributes:
      name: of the run or the cluster.
      devices: what counts as one device there.
      per_1000_device_days: interruptions of a job per 1,000 device-days.
      counted: how the figure follows from what was published.
      source: where it was published.
    """

    name: str
    devices: str
    per_1000_device_days: float
    counted: str
    source: str

    @property
    def mtbf_hours(self) -> float:
        """Device-hours per interruption."""
        return _HOURS / self.per_1000_device_days


FAILURE_RATES = (
    FailureRate(
        "Llama 3 405B", "H100", 419 / (16_384 * 54) * 1000,
        "419 unexpected interruptions, 16,384 GPUs, 54 days", "arXiv 2407.21783, section 3.3.4",
    ),
    FailureRate(
        "Meta RSC-1", "A100", 6.50 / 8,
        "6.50 failures per 1,000 node-days, 8 GPUs a node", "arXiv 2410.21680 (Kokolis et al.)",
    ),
    FailureRate(
        "Meta RSC-2", "A100", 2.34 / 8,
        "2.34 failures per 1,000 node-days, 8 GPUs a node", "arXiv 2410.21680 (Kokolis et al.)",
    ),
    FailureRate(
        "OPT-175B", "A100", 105 / (992 * 60) * 1000,
        "35 manual and 70 automatic restarts, 992 GPUs, 2 months", "arXiv 2205.01068, section 2.5",
    ),
    FailureRate(
        "BLOOM", "A100", 1.5 / 7 / 384 * 1000,
        "1 to 2 GPU failures a week, 384 GPUs", "arXiv 2211.05100, section 3.4",
    ),
    FailureRate(
        "MPT-7B", "A100", 4 / (440 * 9.5) * 1000,
        "4 hardware failures, 440 GPUs, 9.5 days", "mosaicml.com/blog/mpt-7b",
    ),
    FailureRate(
        "MegaScale", "A100", 100 / (12_288 * 28) * 1000,
        "100 restarts, 12,288 GPUs, \"several weeks\": 4 assumed", "arXiv 2402.15627, section 6.3",
    ),
    FailureRate(
        "Alibaba, June 2023", "H800", 40 / (4_096 * 30) * 1000,
        "40 crashes of a job in a month, 4,096 GPUs", "arXiv 2406.04594 (C4)",
    ),
    FailureRate(
        "Google TPU v4", "TPU v4", 0.0008 / 4 * 1000,
        "0.08 % of the machines a day, 4 chips each; hardware alone", "Zu et al., NSDI 2024",
    ),
)  # fmt: skip

# Device-hours per interruption where the user gives none: the median of the table. Chips have no
# rates of their own: rows of one chip differ by more than chips do, and those that count software
# and maintenance differ most from those that do not.
DEFAULT_MTBF_HOURS = statistics.median(rate.mtbf_hours for rate in FAILURE_RATES)
