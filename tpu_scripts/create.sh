#!/usr/bin/env bash
# create.sh [--spot] [--queued] [--firewall] [--slices N] [--dry-run]
# Makes a TPU VM, a pod slice, or several slices, and waits until they are ready.
#
#   --spot      cheaper, and may be taken away at any time (watch.sh makes it anew)
#   --queued    waits in line as a queued resource; --slices N does too
#   --firewall  no machine but the run's own reaches its ports, ssh apart; for the TPU's network
#   --slices N  N slices of ACCELERATOR_TYPE as one run
#   --dry-run   prints the commands only
# From the environment: TPU_NAME, ZONE, ACCELERATOR_TYPE (v5litepod-8, v5p-64, v6e-16, ...), and
# where wanted PROJECT, RUNTIME_VERSION (by the type), NETWORK, POLL_SECONDS (30), and SPOT=1,
# QUEUED=1, FIREWALL=1, SLICES=N for the options.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--spot --queued --firewall --slices" "$@"
need TPU_NAME ZONE ACCELERATOR_TYPE

case $ACCELERATOR_TYPE in
  v5litepod*) version=v2-alpha-tpuv5-lite ;;
  v5p*) version=v2-alpha-tpuv5 ;;
  v6e*) version=v2-alpha-tpuv6e ;;
  *) version='tpu-ubuntu2204-base' ;;
esac
version=${RUNTIME_VERSION:-$version}
more=("${where[@]}" "--accelerator-type=$ACCELERATOR_TYPE" ${NETWORK:+"--network=$NETWORK"})
[ "$SPOT" != 1 ] || more+=(--spot)
[ "$FIREWALL" != 1 ] || more+=("--tags=$tag")

trap 'say_what_is_left; exit 130' INT TERM
give_up() { # give_up STATUS: the sentence was said; names what a failure half-way leaves
  grep -qE 'ALREADY_EXISTS|already exists|PERMISSION_DENIED|INVALID_ARGUMENT' "$errors" ||
    say_what_is_left
  exit "$1"
}

rule() { # rule NAME OPTION ...: one of the firewall's, unless it is there from an earlier TPU
  run gcloud compute firewall-rules create "$tag-$1" "--network=${NETWORK:-default}" \
    ${PROJECT:+"--project=$PROJECT"} --direction=INGRESS "--target-tags=$tag" "${@:2}" \
    2>"$errors" || grep -q 'already exists' "$errors" || { explain || exit $?; }
}
if [ "$FIREWALL" = 1 ]; then
  # Port 22 stays what the network's other rules make of it.
  rule own --action=ALLOW --rules=all "--source-tags=$tag" --priority=800
  rule others --action=DENY --rules=tcp:1-21,tcp:23-65535,udp --source-ranges=0.0.0.0/0 --priority=900
fi

if [ "$QUEUED" != 1 ]; then
  cloud "${tpu[@]}" create "$TPU_NAME" "${more[@]}" "--version=$version" || give_up $?
  exit
fi
if [ "$SLICES" = 1 ]; then
  more+=("--node-id=$TPU_NAME")
else
  more+=("--node-count=$SLICES" "--node-prefix=$TPU_NAME")
fi
cloud "${queue[@]}" create "$TPU_NAME" "${more[@]}" "--runtime-version=$version" || give_up $?
while :; do
  now=$(state ACTIVE) || { explain || give_up $?; }
  case $now in
    ACTIVE) exit ;;
    FAILED | SUSPENDING | SUSPENDED | GONE)
      echo "jaxtrain: the queued resource $TPU_NAME ended as $now before it was ready" >&2
      give_up 1 ;;
  esac
  sleep "${POLL_SECONDS:-30}"
done
