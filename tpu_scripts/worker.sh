#!/usr/bin/env bash
# worker.sh install PACKAGE | start BUCKET RUN train ...
# What the other scripts do on each worker of a TPU; setup.sh copies it there.
set -euo pipefail
cd

install() { # the package and its Python into ~/jaxtrain-env; gcsfuse
  # The images' own Python is older than the 3.11 that jaxtrain needs.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  ~/.local/bin/uv venv --quiet --allow-existing --python 3.12 jaxtrain-env
  ~/.local/bin/uv pip install --quiet --python jaxtrain-env/bin/python \
    --reinstall-package jaxtrain "jaxtrain[tpu] @ file://$HOME/$1"
  command -v gcsfuse >/dev/null && return
  local keys=/usr/share/keyrings/cloud.google.asc packages=https://packages.cloud.google.com/apt
  curl -fsS "$packages/doc/apt-key.gpg" | sudo tee "$keys" >/dev/null
  echo "deb [signed-by=$keys] $packages gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo apt-get update -qq
  sudo apt-get install -qq -y gcsfuse
}

start() { # the run's folder is in the bucket, which outlives the TPU; the log is this worker's own
  local bucket=$1 run=$2
  shift 2
  mkdir -p bucket
  # No cached names: the workers look for each other's files.
  mountpoint -q bucket || gcsfuse --implicit-dirs --rename-dir-limit=1000000 \
    --metadata-cache-ttl-secs=0 "$bucket" bucket >&2
  if ! flock -n jaxtrain.lock true; then
    echo "jaxtrain runs already on $(hostname)"
    return
  fi
  # A session of its own without a terminal: it outlives this ssh. Whatever it starts holds the lock.
  nohup setsid flock -n jaxtrain.lock jaxtrain-env/bin/jaxtrain supervise -- "$@" \
    --workdir "$HOME/bucket/$run" </dev/null >>jaxtrain.log 2>&1 &
}

"$@"
