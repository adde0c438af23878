#!/usr/bin/env bash
# watch.sh [--spot] [--queued] [--firewall] [--slices N] [--retries N] [--delete] [--dry-run]
#   -- train [CONFIG] ...
# Sees a run through: looks at the TPU, makes it anew after a preemption, sets it up and starts the
# same run in the same folder, until its exit.json says done. It may also make the first TPU.
#
#   --retries N  give up after N in a row that did not bring the run back; 10
#   --delete     delete the TPU when the run is done or has failed
#   --dry-run    prints the commands of one preemption and the end of the run
#   --spot, --queued, --firewall, --slices N: as for create.sh
# From the environment: what create.sh and run.sh read; POLL_SECONDS (30) between two looks.
# Status: 0 done; 1 the run failed, or it gave up; 2 a mistake of yours.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--spot --queued --firewall --slices --retries --delete --" "$@"
need TPU_NAME ZONE BUCKET ACCELERATOR_TYPE
[ "${words[0]:-}" = train ] || die 2 "the command goes after --; write for example: watch.sh -- train gpt_quickstart"
retries=0 assumed=PREEMPTED
trap 'say_what_is_left; exit 130' INT TERM

retry() { # retry WHY
  [ -n "$DRY_RUN" ] || echo "jaxtrain: $1 (retry $((retries + 1)) of $RETRIES)"
  if [ "$retries" -ge "$RETRIES" ]; then
    echo "jaxtrain: gave up after $RETRIES retries in a row; $1" >&2
    say_what_is_left
    exit 1
  fi
  retries=$((retries + 1))
}

end() { # end STATUS SENTENCE
  { [ -n "$DELETE" ] && cloud "${remove[@]}"; } || say_what_is_left
  [ -z "$DELETE" ] || [ "$FIREWALL" != 1 ] || remove_rules || :
  [ -n "$DRY_RUN" ] && exit
  echo "jaxtrain: $2"
  exit "$1"
}

workers() { # a line for each worker: running or stopped
  local node
  for node in "${nodes[@]}"; do
    ask stopped "${tpu[@]}" ssh "$node" "${where[@]}" --worker=all \
      '--command=flock -n jaxtrain.lock echo stopped || echo running' || return
  done
}

again() { "$here/run.sh" -- "${words[@]}" || echo "jaxtrain: not started; looking again soon" >&2; }

look_at_the_run() {
  local said told running
  said=$(workers) || { explain || retry "a worker did not answer" && return; }
  told=$(ask '"status": "done"' storage cat "gs://$BUCKET/$RUN/exit.json") ||
    grep -q -e 'matched no' -e 'No URLs' "$errors" ||
    { explain || retry "exit.json could not be read" && return; }
  running=$(grep -c '^running' <<<"$said") || :
  if [ "$running" = 0 ]; then
    case $told in
      *'"status": "done"'*) end 0 "the run in gs://$BUCKET/$RUN is done" ;;
      *'"status": "failed"'*) end 1 "the run in gs://$BUCKET/$RUN failed: $told" ;;
    esac
    retry "no worker was running"
    "$here/setup.sh" && again
  elif ! grep -q '^stopped' <<<"$said"; then
    retries=0
  elif [[ $told != *'"status": "done"'* ]]; then # else they are ending, one after another
    retry "some workers had stopped"
    again
  fi
}

look() {
  local now status=0
  now=$(state "$assumed") || explain || status=$?
  [ "$status" != 2 ] || exit 2
  case $now in
    READY | ACTIVE) look_at_the_run ;;
    PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED | GONE)
      retry "$TPU_NAME is $now"
      [ "$now" = GONE ] || "$here/delete.sh" --yes
      # What create.sh calls a mistake of the user's does not mend by waiting.
      "$here/create.sh" || status=$?
      [ "$status" != 2 ] || exit 2
      assumed=READY
      [ "$status" != 0 ] || { "$here/setup.sh" && again; } ;;
    '') retry "$TPU_NAME did not tell its state" ;;
  esac
}

while :; do
  look || :
  [ -n "$DRY_RUN" ] || sleep "${POLL_SECONDS:-30}"
done
