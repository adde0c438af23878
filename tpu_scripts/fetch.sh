#!/usr/bin/env bash
# fetch.sh [--slices N] [--dry-run]
# Brings metrics.jsonl, loss.png, exit.json and config.gin of a run to runs/RUN here, and each
# worker's log to runs/RUN/logs/NODE/WORKER.log.
#
#   --slices N  as for create.sh
#   --dry-run   prints the commands only
# From the environment: TPU_NAME, ZONE, BUCKET, and where wanted PROJECT, RUN (TPU_NAME), SLICES=N.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--slices" "$@"
need TPU_NAME ZONE BUCKET

run mkdir -p "runs/$RUN"
# Without --recursive: the files beside checkpoints/, not what is in it.
cloud storage rsync "gs://$BUCKET/$RUN" "runs/$RUN"
for node in "${nodes[@]}"; do
  run mkdir -p "runs/$RUN/logs/$node"
  cloud "${tpu[@]}" ssh "$node" "${where[@]}" --worker=all '--command=cat jaxtrain.log' \
    "--output-directory=runs/$RUN/logs/$node"
done
