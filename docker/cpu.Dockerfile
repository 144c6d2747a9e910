# The embedded trainer and everything it needs on one CPU machine. Build it from the root of the
# repository:
#
#   docker build -f docker/cpu.Dockerfile -t nemo-specrl-cpu \
#     --build-arg VERSION=0.1.0 --build-arg COMMIT="$(git rev-parse HEAD)" .
#
# and run it, with the folder of the results on the outside:
#
#   docker run --rm --shm-size=1g -v "$PWD/results:/home/specrl/results" nemo-specrl-cpu \
#     train examples/configs/grpo_sort_cpu.yaml
#
# PIP_EXTRA_INDEX_URL is an index that has torch's builds for CPUs. Build arguments stay readable in
# the image's history: an index that wants a password comes by `--secret id=pip.conf,src=FILE`.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3008 # the base's release of Debian decides
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements/cpu.lock requirements/
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# What scripts/setup.sh installs, at the same versions.
RUN --mount=type=secret,id=pip.conf \
    python -m venv /opt/nemo_specrl \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/nemo_specrl/bin/pip install \
        --no-cache-dir --no-deps --requirement requirements/cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY nemo_specrl nemo_specrl
RUN /opt/nemo_specrl/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
# hadolint ignore=DL3008 # as above; vLLM's library for CPUs is linked with it
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home specrl
COPY --from=build /opt/nemo_specrl /opt/nemo_specrl
ENV PATH=/opt/nemo_specrl/bin:$PATH
USER 10001:10001
WORKDIR /home/specrl
COPY examples examples
RUN nemo-specrl doctor
# Images in OCI's format have no health check: there, run `nemo-specrl doctor`.
HEALTHCHECK --interval=10m --timeout=60s CMD ["nemo-specrl", "doctor"]
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="nemo_specrl on a CPU" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${COMMIT}" \
    org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["nemo-specrl"]
CMD ["--help"]
