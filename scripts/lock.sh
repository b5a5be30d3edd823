#!/usr/bin/env bash
# Resolve the pins of requirements*.txt to requirements*.lock: every package they need, with version and hashes.
#   bash scripts/lock.sh        after a change of requirements*.txt; needs uv (pip install uv) and the package index
# torch and its CUDA packages stay out: their builds differ by machine, and torch's own metadata pins them.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
together=$(mktemp)
trap 'rm -f "$together"' EXIT
resolve() { uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-annotate --no-header "$@"; }
without=()
for package in torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime} \
  nvidia-{cudnn-cu13,cufft,cufile,curand,cusolver,cusparse,cusparselt-cu13,nccl-cu13,nvjitlink,nvshmem-cu13,nvtx}; do
  without+=(--no-emit-package "$package")
done
resolve requirements.txt requirements-tracking.txt requirements-gguf.txt requirements-serve.txt requirements-ray.txt requirements-s3.txt requirements-cflue.txt requirements-linear.txt -o "$together" # one version of each, whatever is installed
for profile in requirements requirements-tracking requirements-gguf requirements-serve requirements-ray requirements-s3 requirements-cflue requirements-linear; do
  { echo "# Made by scripts/lock.sh from $profile.txt."; resolve "$profile.txt" -c "$together" "${without[@]}"; } >"$profile.lock"
done
