# A session on GPUs: docker build -t tlt . && docker run --gpus all --shm-size 100g -it tlt
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential ca-certificates git libnuma1 make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tlt
COPY . .
RUN make setup DEVICE=cuda
ENV PATH=/opt/tlt/.venv/bin:$PATH
CMD ["bash"]
