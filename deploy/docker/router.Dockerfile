# syntax=docker/dockerfile:1
# kappa route alone: linux/amd64 and linux/arm64, without Ray, torch, vLLM and numba.
# Build at the root of the repository:
#   docker buildx build -f deploy/docker/router.Dockerfile -t kappa-router:0.2.0 .

# Of 19 September 2026 (docker-library/repo-info), for every platform.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_LINK_MODE=copy
WORKDIR /src
COPY locks/build.lock ./locks/
RUN python -m pip install --require-hashes --no-deps -r locks/build.lock \
    && python -m venv --without-pip /opt/kappa
COPY requirements.lock ./
COPY kappa ./kappa
COPY router ./router
# The lock's versions, each checked against its hash; our own wheels are in no lock.
RUN for project in kappa router; do \
        (cd "$project" && hatchling build -t wheel -d /dist) || exit 1; \
    done \
    && uv pip install --python /opt/kappa/bin/python --find-links /dist \
        --constraints requirements.lock kappa-router
# Compiled here, since the file system is read-only later.
RUN /opt/kappa/bin/python -m compileall -q -j 0 /opt/kappa/lib

FROM ${BASE}
RUN groupadd --gid 1000 kappa && useradd --uid 1000 --gid 1000 --no-create-home kappa
COPY --from=build /opt/kappa /opt/kappa
ENV PATH=/opt/kappa/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["kappa-router"]
# Which servers: docs/route.md.
CMD ["--help"]
