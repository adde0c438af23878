# shellcheck shell=bash
# What the scripts beside this file share: options, one sentence for a failure, dry runs, gcloud.
# Written for bash 3.2 too, which macOS has.
# shellcheck disable=SC2034  # the scripts that read this use them

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DRY_RUN=${DRY_RUN:-} SPOT=${SPOT:-} QUEUED=${QUEUED:-} FIREWALL=${FIREWALL:-} SLICES=${SLICES:-1}
YES='' DELETE='' WHEEL='' RETRIES=10 words=()
errors=$(mktemp "${TMPDIR:-/tmp}/jaxtrain-gcloud.XXXXXX")
trap 'rm -f "$errors"' EXIT
# Commands of a dry run are printed here, also from inside $(...).
exec 3>&1

die() { # die STATUS SENTENCE
  echo "jaxtrain: $2" >&2
  exit "$1"
}

quoted() { # its arguments, as a shell reads them back
  local word between=''
  for word; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*)
        word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
    esac
    printf '%s%s' "$between" "$word"
    between=' '
  done
}

options() { # options "ALLOWED ..." "$@": sets the variables above; `words` is what follows --
  local allowed=" --help --dry-run $1 "
  shift
  while [ $# -gt 0 ]; do
    case $allowed in
      *" $1 "*) ;;
      *) die 2 "$1 is not an option of ${0##*/}; it takes:$allowed" ;;
    esac
    case $1 in
      --slices | --wheel | --retries) [ -n "${2:-}" ] || die 2 "$1 needs a value after it" ;;
    esac
    case $1 in
      --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;;
      --dry-run) DRY_RUN=1 ;;
      --spot) SPOT=1 ;;
      --queued) QUEUED=1 ;;
      --firewall) FIREWALL=1 ;;
      --yes) YES=1 ;;
      --delete) DELETE=1 ;;
      --slices) SLICES=$2 && shift ;;
      --wheel) WHEEL=$2 && shift ;;
      --retries) RETRIES=$2 && shift ;;
      --) shift && words=("$@") && break ;;
    esac
    shift
  done
  [[ $SLICES =~ ^[1-9][0-9]*$ ]] || die 2 "--slices $SLICES: a whole number from 1 is needed"
  [[ $RETRIES =~ ^[0-9]+$ ]] || die 2 "--retries $RETRIES: a whole number is needed"
  export DRY_RUN SPOT QUEUED FIREWALL SLICES
}

need() { # need NAME ...: these variables, and gcloud
  local name
  for name; do
    [ -n "${!name:-}" ] || die 2 "$name is not set; write: export $name=... (see ${0##*/} --help)"
  done
  [ -n "$DRY_RUN" ] || command -v gcloud >/dev/null ||
    die 2 "gcloud is not on PATH: install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install)"
  where=("--zone=$ZONE" ${PROJECT:+"--project=$PROJECT"})
  BUCKET=${BUCKET:-} BUCKET=${BUCKET#gs://} BUCKET=${BUCKET%/} RUN=${RUN:-$TPU_NAME}
  nodes=("$TPU_NAME")
  # The nodes of a queued resource of several slices are numbered.
  if [ "$SLICES" != 1 ]; then nodes=() QUEUED=1; fi
  while [ "$SLICES" != 1 ] && [ ${#nodes[@]} -lt "$SLICES" ]; do
    nodes+=("$TPU_NAME-${#nodes[@]}")
  done
  tpu=(compute tpus tpu-vm)
  queue=(compute tpus queued-resources)
  tag=jaxtrain-$TPU_NAME
  remove=("${tpu[@]}" delete "$TPU_NAME" "${where[@]}" --quiet)
  [ "$QUEUED" != 1 ] || remove=("${queue[@]}" delete "$TPU_NAME" "${where[@]}" --force --quiet)
}

run() { # runs a command; a dry run prints it
  if [ -n "$DRY_RUN" ]; then quoted "$@" >&3 && echo >&3; else "$@"; fi
}

cloud() { # runs gcloud; what it says of a failure becomes one sentence
  run gcloud "$@" 2>"$errors" || explain
}

ask() { # ask ANSWER WORD ...: what gcloud answers; in a dry run ANSWER
  local answer=$1
  shift
  run gcloud "$@" 2>"$errors" || return
  [ -z "$DRY_RUN" ] || echo "$answer"
}

remove_rules() { # the firewall's for this TPU; where there are none that is well too
  run gcloud compute firewall-rules delete "$tag-own" "$tag-others" \
    ${PROJECT:+"--project=$PROJECT"} --quiet 2>"$errors" ||
    grep -q 'was not found' "$errors" || explain
}

state() { # state ANSWER: the TPU's state in a word; GONE where there is none
  local kind=("${tpu[@]}") field=state
  [ "$QUEUED" != 1 ] || kind=("${queue[@]}") field=state.state
  ask "$1" "${kind[@]}" describe "$TPU_NAME" "${where[@]}" "--format=value($field)" && return
  grep -q NOT_FOUND "$errors" && echo GONE
}

explain() { # says in one sentence what gcloud said; status 2: the user's to mend, 1: try again
  local said status=2
  said=$(cat "$errors")
  case $said in
    *ALREADY_EXISTS* | *"already exists"*)
      said="TPU_NAME=$TPU_NAME is taken in ZONE=$ZONE and costs money while it runs; take another name, or delete it with tpu_scripts/delete.sh" ;;
    *"may not exist"* | *LOCATION_POLICY_VIOLATED* | *"Invalid location"* | *"Unknown zone"*)
      said="ZONE=$ZONE does not exist or is not open to this project; list the zones with: gcloud compute tpus locations list" ;;
    *"accelerator configuration"* | *"not found in zone"*)
      said="ACCELERATOR_TYPE=${ACCELERATOR_TYPE:-} is not offered in ZONE=$ZONE; list them with: gcloud compute tpus accelerator-types list --zone=$ZONE" ;;
    *[Qq]uota*)
      said="no quota for this in ZONE=$ZONE: $(sed -n 's/.*\([Qq]uota [^"]*\).*/\1/p' "$errors" | head -1 | sed 's/\. /, /g'); ask for more, or take another ACCELERATOR_TYPE, zone or --spot" ;;
    *capacity*) status=1
      said="ZONE=$ZONE has no ${ACCELERATOR_TYPE:-such TPU} to spare now; try later, another zone, or wait in line with --queued" ;;
    *"return code [255]"*)
      said="a worker of $TPU_NAME cannot be reached by ssh (run 'ssh-add ~/.ssh/google_compute_engine', and look at its state: gcloud compute tpus tpu-vm describe ${nodes[0]} --zone=$ZONE)" ;;
    *"terminal state"*)
      said="$TPU_NAME was taken away: watch.sh makes it anew, or delete.sh and create.sh do" ;;
    *NOT_FOUND*) said="there is no TPU called $TPU_NAME in ZONE=$ZONE" ;;
    *)
      case $said in *PERMISSION_DENIED* | *INVALID_ARGUMENT* | *"active account"* | *"gcloud auth login"*) ;; *) status=1 ;; esac
      said="gcloud failed: $(grep -m1 '^ERROR' "$errors" || tail -1 "$errors")$(sed -n 's/^ - / /p' "$errors" | head -1)" ;;
  esac
  echo "jaxtrain: $said" >&2
  return "$status"
}

say_what_is_left() { # what there is in the cloud now, and how to delete it
  local now there
  now=$(state READY) || now=''
  there="is there ($now) and costs money while it has machines"
  [ -n "$now" ] || there='may be there, which gcloud does not tell, and then costs money'
  [ -n "$DRY_RUN" ] || [ "$now" = GONE ] ||
    echo "jaxtrain: $TPU_NAME $there; delete it with: $(quoted gcloud "${remove[@]}")" >&2
}
