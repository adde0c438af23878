#!/usr/bin/env bash
# worker.sh install PACKAGE | start BUCKET RUN train ... | token FILE
# What the other scripts do on each worker of a TPU; setup.sh copies it there, and makes the token
# with it here.
set -euo pipefail
cd

token() { # 256 random bits in a file that only its user can read, unless there is one
  if [ -s "$1" ]; then return; fi
  umask 077
  mkdir -p "$(dirname "$1")"
  head -c 32 /dev/urandom | base64 >"$1"
}

install() { # the package and its Python into ~/jaxtrain-env
  chmod 600 jaxtrain.token
  # The images' own Python is older than the 3.11 that jaxtrain needs.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  ~/.local/bin/uv venv --quiet --allow-existing --python 3.12 jaxtrain-env
  ~/.local/bin/uv pip install --quiet --python jaxtrain-env/bin/python \
    --reinstall-package jaxtrain "jaxtrain[tpu,gcs] @ file://$HOME/$1"
}

start() { # the run's folder is in the bucket, which outlives the TPU; the log is this worker's own
  local bucket=$1 run=$2
  shift 2
  if ! flock -n jaxtrain.lock true; then
    echo "jaxtrain runs already on $(hostname)"
    return
  fi
  # By the environment, which only this user can read.
  JAXTRAIN_TOKEN=$(cat jaxtrain.token)
  export JAXTRAIN_TOKEN
  # A session of its own without a terminal: it outlives this ssh. Whatever it starts holds the lock.
  nohup setsid flock -n jaxtrain.lock jaxtrain-env/bin/jaxtrain supervise -- "$@" \
    --workdir "gs://$bucket/$run" </dev/null >>jaxtrain.log 2>&1 &
}

"$@"
