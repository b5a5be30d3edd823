# The environment of every rank: packages of requirements.lock, with hashes. The code comes from the run directory.
#   docker build -t finlm:0.1.0-cuda .
#   docker build -t finlm:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# The CUDA libraries are torch's own; the host brings the driver through NVIDIA's container runtime.
FROM python:3.11-slim-bookworm
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends g++ git libaio-dev openssh-client openssh-server rsync \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /finlm
COPY requirements.txt requirements.lock requirements-v100.txt pyproject.toml README.md LICENSE ./
COPY scripts/setup.sh scripts/setup.py scripts/
COPY recipes recipes
COPY src src
# Empty: the package index's build, which needs a GPU to be of use. requirements-v100.txt is for V100.
ARG TORCH_INDEX=""
ARG PROFILE=requirements.txt
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" PIP_NO_CACHE_DIR=1 bash scripts/setup.sh "$PROFILE"
ENV PATH=/finlm/.venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["finlm", "--help"]
