"""The options of the commands that plan, prove and look, and the help that they print."""

from jaxtrain.run.options import Add, add_config_options


def add_analysis_commands(add: Add) -> None:
    """Adds verify, plan, timeline and doctor."""
    command = add("verify", "proves a config, shrunk, on 8 simulated devices")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--json", metavar="FILE", help="write the table into this file too")
    add_config_options(command)

    command = add("plan", "compiles a config's train step for machines not there")
    command.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a .gin file or shipped config"
    )
    command.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET",
        help="v5p:4x4x4 (chips; with Mesh.dcn of a slice), h100:2x8 (hosts x GPUs), cpu:8; given "
        "several times, and with a list of values after -b, the plans stand side by side",
    )
    command.add_argument("--search", action="store_true", help="find the best mesh for the target")
    command.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="closed forms alone: an estimate that needs no compiler",
    )
    command.add_argument(
        "--thorough",
        action="store_true",
        help="compile for a TPU as long as for the run itself, about ten times as long",
    )
    command.add_argument(
        "--budget", type=float, metavar="FLOPS", help="the compute-optimal model and its tokens"
    )
    command.add_argument(
        "--price", type=float, metavar="DOLLARS", help="of one device for an hour: the run's cost"
    )
    command.add_argument(
        "--tokens", type=float, metavar="N", help="of the whole run, in place of Train.steps'"
    )
    command.add_argument(
        "--network", type=float, metavar="GBITS", help="Gb/s of each device between hosts or slices"
    )
    command.add_argument(
        "--disk",
        type=float,
        metavar="GBYTES",
        help="GB/s each device has of its host's disks, for Offload.optimizer_state='disk'; 5",
    )
    command.add_argument("--json", metavar="FILE", help="write everything into this file too")
    command.add_argument(
        "--png", metavar="FILE", help="draw memory, time and traffic into this file"
    )
    add_config_options(command)

    command = add("timeline", "simulates the pipeline schedule and draws it")
    command.add_argument("config", metavar="CONFIG", help="a .gin file or a shipped config")
    command.add_argument("--png", metavar="FILE", help="draw the schedule into this file")
    add_config_options(command)

    add("doctor", "prints versions, devices, extras")
