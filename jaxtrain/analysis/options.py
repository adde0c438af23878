"""Command-line options of `plan`, `verify`, `timeline` and `doctor`."""

from jaxtrain.run.commands.options import Add, add_config_options


def add_analysis_commands(add: Add) -> None:
    """Add the commands verify, plan, timeline and doctor."""
    command = add("verify", "Verify a config, shrunk, on 8 simulated devices.")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--json", metavar="FILE", help="also write the results to this file")
    command.add_argument("--html", metavar="FILE", help="write a self-contained page to this file")
    add_config_options(command)

    command = add("plan", "Predict memory, traffic and step time on a target machine.")
    command.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a .gin file or shipped config"
    )
    command.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET",
        help="target machine: TPU chips per dimension, such as v5p:4x4x4 (of one slice with "
        "Mesh.dcn), GPU hosts x GPUs, such as h100:2x8, or cpu:8; repeat it, or give a list of "
        "values after -b, to compare plans",
    )
    command.add_argument(
        "--search", action="store_true", help="search for the best layout on the target"
    )
    command.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="estimate from closed forms, without compiling",
    )
    command.add_argument(
        "--thorough",
        action="store_true",
        help="compile for TPUs with full optimization (about ten times as long)",
    )
    command.add_argument(
        "--budget",
        type=float,
        metavar="FLOPS",
        help="plan the compute-optimal model for this budget",
    )
    command.add_argument(
        "--price",
        type=float,
        metavar="DOLLARS",
        help="price of a device-hour, for the cost of the run",
    )
    command.add_argument(
        "--tokens",
        type=float,
        metavar="N",
        help="tokens of the whole run (default: those of Train.steps)",
    )
    command.add_argument(
        "--network",
        type=float,
        metavar="GBITS",
        help="network bandwidth per device between hosts or slices, in Gb/s",
    )
    command.add_argument(
        "--disk",
        type=float,
        metavar="GBYTES",
        help="disk bandwidth per device, in GB/s, for Offload.optimizer_state='disk' (default: 5)",
    )
    command.add_argument(
        "--measured",
        type=float,
        metavar="SECONDS",
        help="measured step time of CONFIG on the target, in seconds: calibrates its predicted "
        "time, and those of other layouts as far as they are similar",
    )
    command.add_argument(
        "--calibrate",
        metavar="RUN",
        help="the workdir of a run on the target's chips: calibrates by its median step",
    )
    command.add_argument(
        "--hosts",
        metavar="MIN:MAX",
        help="the layouts of an elastic run (supervise --hosts); the target has MAX hosts",
    )
    command.add_argument(
        "--goodput",
        action="store_true",
        help="plan the whole run under failures: useful time, best save interval, days, cost",
    )
    command.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="device-hours per interruption, for --goodput (default: the median of published runs)",
    )
    command.add_argument(
        "--storage",
        type=float,
        metavar="GBYTES",
        help="checkpoint bandwidth per host, in GB/s, for --goodput (default: 1)",
    )
    command.add_argument("--json", metavar="FILE", help="also write the plan to this file")
    command.add_argument("--png", metavar="FILE", help="draw memory, time and traffic to this file")
    command.add_argument("--html", metavar="FILE", help="write a self-contained page to this file")
    add_config_options(command)

    command = add("timeline", "Simulate a pipeline schedule and draw it.")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--png", metavar="FILE", help="draw the schedule to this file")
    add_config_options(command)

    add("doctor", "Print versions, devices and missing extras.")
