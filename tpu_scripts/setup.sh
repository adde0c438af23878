#!/usr/bin/env bash
# setup.sh [--wheel FILE] [--slices N] [--dry-run]
# Installs jaxtrain[tpu] on every worker: from this clone as it stands, or from a wheel. Gives all
# of them the token that the run's processes know each other by: made once, kept with mode 0600 in
# ~/.jaxtrain/TPU_NAME here and in ~/jaxtrain.token there.
#
#   --wheel FILE  install this wheel instead of the clone
#   --slices N    as for create.sh
#   --dry-run     prints the commands only
# From the environment: TPU_NAME, ZONE, and where wanted PROJECT, SLICES=N.
set -euo pipefail
# shellcheck source=common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/common.sh"
options "--wheel --slices" "$@"
need TPU_NAME ZONE

# This TPU's own folder, that no other setup at the same time and no other user writes into.
mine=~/.jaxtrain/$TPU_NAME
# A file, since what stands on a command line is in the list of processes and in gcloud's logs.
token=$mine/jaxtrain.token
[ -z "$WHEEL" ] || [ -f "$WHEEL" ] || die 2 "--wheel $WHEEL: there is no such file"
run bash "$here/worker.sh" token "$token"
package=$WHEEL
if [ -z "$WHEEL" ]; then
  package=$mine/jaxtrain.tar.gz
  run env COPYFILE_DISABLE=1 tar -czf "$package" -C "$here/.." --exclude=__pycache__ \
    pyproject.toml README.md LICENSE configs jaxtrain
fi
for node in "${nodes[@]}"; do
  cloud "${tpu[@]}" scp "$package" "$here/worker.sh" "$token" "$node:" "${where[@]}" --worker=all
  cloud "${tpu[@]}" ssh "$node" "${where[@]}" --worker=all \
    "--command=bash worker.sh install $(quoted "${package##*/}")"
done
