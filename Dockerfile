# The image of a run; it does what `bert-jax` does: `prepare`, `pretrain`, `plan`.
#
#   docker build --build-arg COMMIT=$(git rev-parse HEAD) --tag IMAGE .
#
# The base is pinned by its tag. To pin its bytes too, write the digest that `docker pull` shows
# behind both tags: python:3.11.13-slim-bookworm@sha256:...

FROM python:3.11.13-slim-bookworm AS build
# Extras of setup.cfg; `gcs` alone makes an image that prepares text and has no compiler for TPUs.
ARG EXTRAS=tpu,gcs
WORKDIR /source
COPY constraints.txt pyproject.toml setup.cfg README.md LICENSE ./
COPY bert_jax ./bert_jax
COPY launch ./launch
COPY experiments ./experiments
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && python -m venv /opt/bert_jax \
 && /opt/bert_jax/bin/python -m pip install --no-cache-dir --constraint constraints.txt \
      "bert_jax[${EXTRAS}] @ file://$(ls /wheels/bert_jax-*.whl)"

FROM python:3.11.13-slim-bookworm
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="bert-jax" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}"
RUN groupadd --gid 1000 bert \
 && useradd --uid 1000 --gid 1000 --create-home bert
COPY --from=build /opt/bert_jax /opt/bert_jax
COPY --chown=1000:1000 experiments /home/bert/experiments
ENV PATH=/opt/bert_jax/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/bert
ENTRYPOINT ["bert-jax"]
CMD ["--help"]
