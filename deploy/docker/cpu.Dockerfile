# syntax=docker/dockerfile:1
# kappa-serve on CPU machines (paced nodes): linux/amd64, for which the CPU build of vLLM is locked.
# Build at the root of the repository:
#   docker buildx build -f deploy/docker/cpu.Dockerfile --platform linux/amd64 -t kappa-serve:0.2.0-cpu .

# Of 19 September 2026 (docker-library/repo-info), for every platform.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS build
# Where the CPU build of torch is; a mirror or a folder mounted into the build does as well.
ARG TORCH_WHEELS=https://download.pytorch.org/whl/cpu/torch/
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
WORKDIR /src
COPY locks/build.lock ./locks/
RUN python -m pip install --require-hashes --no-deps -r locks/build.lock \
    && python -m venv /opt/kappa
# The packages first: they change seldom, and this layer is large.
COPY requirements.lock ./
RUN uv pip install --python /opt/kappa/bin/python --no-deps --require-hashes \
    --find-links "$TORCH_WHEELS" -r requirements.lock
COPY . .
RUN for project in */pyproject.toml; do \
        (cd "$(dirname "$project")" && hatchling build -t wheel -d /dist) || exit 1; \
    done \
    && uv pip install --python /opt/kappa/bin/python --no-deps /dist/*.whl
# Compiled here, since the file system is read-only later. torch ships files for later Pythons, which
# do not compile: that is no fault.
RUN /opt/kappa/bin/python -m compileall -q -j 0 /opt/kappa/lib >/dev/null || true

FROM ${BASE}
# gcc: torch compiles small kernels at run time. libnuma1: vLLM links to it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 1000 kappa && useradd --uid 1000 --gid 1000 --create-home kappa \
    && install --directory --owner kappa --group kappa /var/cache/kappa
COPY --from=build /opt/kappa /opt/kappa
ENV PATH=/opt/kappa/bin:$PATH KAPPA_HOME=/var/cache/kappa PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
WORKDIR /var/cache/kappa
EXPOSE 8000 8080
ENTRYPOINT []
# Refused as it stands: beyond loopback it wants keys. Mount a cluster file that names a keys file, or
# add --allow-open where something else guards the port.
CMD ["kappa", "serve", "--host", "0.0.0.0"]
