#!/usr/bin/env bash
# run.sh [--slices N] [--dry-run] -- train [CONFIG] [-b BINDING]...
# Starts `jaxtrain supervise -- train ...` on every worker and returns; a run goes on when the
# connection ends. Its folder is gs://BUCKET/RUN; each worker's log is its ~/jaxtrain.log.
#
#   --slices N  as for create.sh
#   --dry-run   prints the commands only
# From the environment: TPU_NAME, ZONE, BUCKET, and where wanted PROJECT, RUN (TPU_NAME), SLICES=N.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--slices --" "$@"
need TPU_NAME ZONE BUCKET

[ "${words[0]:-}" = train ] || die 2 "the command goes after --; write for example: run.sh -- train gpt_quickstart"
for word in "${words[@]}"; do
  case $word in --workdir*) die 2 "$word: the run's folder is gs://$BUCKET/$RUN; set BUCKET and RUN instead" ;; esac
done
for node in "${nodes[@]}"; do
  cloud "${tpu[@]}" ssh "$node" "${where[@]}" --worker=all \
    "--command=bash worker.sh start $(quoted "$BUCKET" "$RUN" "${words[@]}")"
done
