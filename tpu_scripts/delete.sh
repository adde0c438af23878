#!/usr/bin/env bash
# delete.sh [--yes] [--queued] [--firewall] [--slices N] [--dry-run]
# Deletes the TPU, after asking. The bucket and the run's folder in it stay.
#
#   --yes                 does not ask
#   --queued, --slices N  as for create.sh
#   --firewall            the rules too that create.sh --firewall made
#   --dry-run             prints the command only
# From the environment: TPU_NAME, ZONE, and where wanted PROJECT, QUEUED=1, FIREWALL=1, SLICES=N.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--yes --queued --firewall --slices" "$@"
need TPU_NAME ZONE

if [ -z "$YES$DRY_RUN" ]; then
  answer=''
  read -r -p "Delete $TPU_NAME in $ZONE with everything on its disks? [y/N] " answer || :
  [[ $answer == [yY]* ]] || die 1 "not deleted: $TPU_NAME costs money while it has machines"
fi
cloud "${remove[@]}"
[ "$FIREWALL" != 1 ] || remove_rules
