# syntax=docker/dockerfile:1
# kappa-serve on NVIDIA GPUs: linux/amd64 (A100, H100, H200) and linux/arm64 (GH200, GB200).
# Build at the root of the repository:
#   docker buildx build -f deploy/docker/cuda.Dockerfile --platform linux/amd64,linux/arm64 \
#       -t kappa-serve:0.2.0-cuda .
# CUDA's libraries come as wheels with torch; the driver comes from the host (NVIDIA's runtime).

# Of 19 September 2026 (docker-library/repo-info), for every platform.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS build
# Set by buildx: amd64 or arm64.
ARG TARGETARCH
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
WORKDIR /src
COPY locks/build.lock ./locks/
RUN python -m pip install --require-hashes --no-deps -r locks/build.lock \
    && python -m venv /opt/kappa
# The packages first: they change seldom, and this layer is large.
COPY requirements-gpu.lock requirements-gpu-aarch64.lock ./
RUN case "$TARGETARCH" in \
        amd64) lock=requirements-gpu.lock ;; \
        arm64) lock=requirements-gpu-aarch64.lock ;; \
        *) echo "no lock for '$TARGETARCH': build with --platform linux/amd64 or linux/arm64" >&2; \
            exit 1 ;; \
    esac \
    && uv pip install --python /opt/kappa/bin/python --no-deps --require-hashes -r "$lock"
COPY . .
RUN for project in */pyproject.toml; do \
        (cd "$(dirname "$project")" && hatchling build -t wheel -d /dist) || exit 1; \
    done \
    && uv pip install --python /opt/kappa/bin/python --no-deps /dist/*.whl
# Compiled here, since the file system is read-only later. torch ships files for later Pythons, which
# do not compile: that is no fault.
RUN /opt/kappa/bin/python -m compileall -q -j 0 /opt/kappa/lib >/dev/null || true

FROM ${BASE}
# gcc, g++: Triton compiles its launchers at run time, torch.compile what stays on the CPU. There is no
# nvcc, without which vLLM leaves FlashInfer alone. libnuma1: for memory beside the GPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 1000 kappa && useradd --uid 1000 --gid 1000 --create-home kappa \
    && install --directory --owner kappa --group kappa /var/cache/kappa
COPY --from=build /opt/kappa /opt/kappa
# Code compiled at run time goes below HOME, but for torch's own cache: one folder to mount.
ENV PATH=/opt/kappa/bin:$PATH KAPPA_HOME=/var/cache/kappa HOME=/var/cache/kappa \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/kappa/torchinductor PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /var/cache/kappa
EXPOSE 8000 8080
ENTRYPOINT []
# Refused as it stands: beyond loopback it wants keys. Mount a cluster file that names a keys file, or
# add --allow-open where something else guards the port.
CMD ["kappa", "serve", "--host", "0.0.0.0"]
