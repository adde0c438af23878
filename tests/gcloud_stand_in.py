"""Stands in for gcloud on PATH: records every call and replays answers of the real one.

GCLOUD_ANSWERS names a JSON file such as {"tpu-vm describe": ["creating", "ready"]}: what the calls
with these words answer in turn, the last one again and again; other calls succeed in silence.
GCLOUD_RECORD names the file that takes each call's words, one JSON list a line.
"""

import json
import os
import re
import sys
from pathlib import Path

PLACE = "projects/my-project/locations/us-west4-a"
ERROR = "ERROR: (gcloud.compute.tpus.tpu-vm.{command}) "


def node(state: str) -> str:
    """What `tpu-vm describe --format=json` says of a slice of two workers."""
    endpoints = [
        {"accessConfig": {"externalIp": f"34.1.2.{n}"}, "ipAddress": f"10.0.0.{n}", "port": 8470}
        for n in (2, 3)
    ]
    return json.dumps(
        {
            "acceleratorType": "v5litepod-8",
            "apiVersion": "V2",
            "health": "HEALTHY",
            "name": f"{PLACE}/nodes/my-tpu",
            "networkEndpoints": endpoints,
            "runtimeVersion": "v2-alpha-tpuv5-lite",
            "schedulingConfig": {"spot": True},
            "state": state,
        }
    )


def queued(state: str) -> str:
    """What `queued-resources describe --format=json` says."""
    spec = {"node": {"acceleratorType": "v5litepod-8"}, "nodeId": "my-tpu", "parent": PLACE}
    return json.dumps(
        {
            "name": f"{PLACE}/queuedResources/my-tpu",
            "spot": {},
            "state": {"state": state, "stateInitiator": "SERVICE"},
            "tpu": {"nodeSpec": [spec]},
        }
    )


# Exit status, standard output, standard error.
ANSWERS = {
    "ok": (0, "", ""),
    **{state.lower(): (0, node(state), "") for state in ("CREATING", "READY", "PREEMPTED")},
    **{
        state.lower(): (0, queued(state), "")
        for state in ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "SUSPENDED", "FAILED")
    },
    "gone": (1, "", ERROR + f"NOT_FOUND: Resource '{PLACE}/nodes/my-tpu' was not found"),
    "name taken": (
        1,
        "",
        ERROR + f"ALREADY_EXISTS: Resource '{PLACE}/nodes/my-tpu' already exists\n"
        "- '@type': type.googleapis.com/google.rpc.ResourceInfo\n"
        f"  resourceName: {PLACE}/nodes/my-tpu",
    ),
    "wrong zone": (
        1,
        "",
        ERROR + "PERMISSION_DENIED: Permission denied on 'locations/us-west4-a' (or it may not "
        "exist). This command is authenticated as me@example.com which is the active account.\n"
        "- '@type': type.googleapis.com/google.rpc.ErrorInfo\n"
        "  reason: LOCATION_POLICY_VIOLATED",
    ),
    "wrong type": (
        1,
        "",
        ERROR + "INVALID_ARGUMENT: Cloud TPU received a bad request. The requested accelerator "
        'configuration for accelerator type, "v5litepod-8", could not be found in the zonal '
        'accelerator configurations for "us-west4-a".',
    ),
    "quota": (
        1,
        "",
        "Waiting for operation [operation-1756] to complete...failed.\n" + ERROR + '{\n  "code": 8,'
        '\n  "message": "Quota \'TPUV5sLitepodPerProjectPerZoneForTPUAPI\' exhausted. Limit 4 in '
        'zone us-west4-a"\n}',
    ),
    "no capacity": (
        1,
        "",
        "Waiting for operation [operation-1757] to complete...failed.\n" + ERROR + '{\n  "code": 8,'
        '\n  "message": "There is no more capacity in the zone \\"us-west4-a\\"; you can try in '
        'another zone where Cloud TPU Nodes are offered [EID: 0xe1d1ce9f2eae7a03]"\n}',
    ),
    "interrupted": (1, "", ERROR + "Operation operation-1758 has not finished in 1800 seconds."),
    "logged out": (1, "", ERROR + "You do not currently have an active account selected."),
    "unreachable": (
        255,
        "running\n",
        "SSH: Attempting to connect to worker 1...\n"
        "ssh: connect to host 34.1.2.3 port 22: Connection timed out\n"
        "Failed to execute command on multiple workers. This may have happened if you have not "
        'added your SSH key to your ssh-agent using "ssh-add ~/.ssh/google_compute_engine".\n'
        + ERROR
        + "[/usr/bin/ssh] exited with return code [255].",
    ),
    "taken away": (
        1,
        "",
        ERROR + 'This TPU has terminal state "PREEMPTED", so it cannot be used anymore.',
    ),
    "all run": (0, "running\nrunning\n", "SSH: Attempting to connect to worker 0...\n"),
    "some run": (0, "stopped\nrunning\n", "SSH: Attempting to connect to worker 0...\n"),
    "none runs": (0, "stopped\nstopped\n", "SSH: Attempting to connect to worker 0...\n"),
    "rule there": (
        1,
        "",
        "ERROR: (gcloud.compute.firewall-rules.create) Could not fetch resource:\n - The resource "
        "'projects/my-project/global/firewalls/jaxtrain-my-tpu-own' already exists",
    ),
    "no rule": (
        1,
        "",
        "ERROR: (gcloud.compute.firewall-rules.delete) Could not fetch resource:\n - The resource "
        "'projects/my-project/global/firewalls/jaxtrain-my-tpu-own' was not found",
    ),
    "no right": (
        1,
        "",
        "ERROR: (gcloud.compute.firewall-rules.create) Could not fetch resource:\n - Required "
        "'compute.firewalls.create' permission for 'projects/my-project/global/firewalls/x'",
    ),
    "no object": (
        1,
        "",
        "ERROR: (gcloud.storage.cat) The following URLs matched no objects or files:\n"
        "gs://my-bucket/my-tpu/exit.json",
    ),
    **{
        f"run {status}": (
            0,
            # A reason may hold the words that are looked for.
            f'{{"status": "{status}", "reason": "stopped while running", "step": 7, "attempt": 2}}',
            "",
        )
        for status in ("done", "preempted")
    },
    "run failed": (
        0,
        '{"status": "failed", "reason": "the loss is nan", "step": 7, "attempt": 2}',
        "",
    ),
}


def main(words: list[str]) -> int:
    record = Path(os.environ["GCLOUD_RECORD"])
    earlier = [json.loads(line) for line in record.read_text().splitlines()]
    with record.open("a") as file:
        file.write(json.dumps(words) + "\n")
    name = "ok"
    for pattern, turns in json.loads(Path(os.environ["GCLOUD_ANSWERS"]).read_text()).items():
        if pattern in " ".join(words):
            number = sum(pattern in " ".join(call) for call in earlier)
            name = turns[min(number, len(turns) - 1)]
            break
    status, out, error = ANSWERS[name]
    options = dict(word.split("=", 1) for word in words if re.match(r"--[a-z-]+=", word))
    field = re.fullmatch(r"value\((.*)\)", options.get("--format", ""))
    if field and out:
        value = json.loads(out)
        for key in field[1].split("."):
            value = value[key]
        out = f"{value}\n"
    if folder := options.get("--output-directory"):
        # The real one rejects a folder that is not there.
        for worker in range(2):
            (Path(folder) / f"{worker}.log").write_text(f"log of worker {worker}\n")
    sys.stdout.write(out)
    if error:
        sys.stderr.write(error.replace("{command}", [*words, ""][3]) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
