# The gateway, compiled: docker build --tag inferry .
# --build-arg EXTRAS=engine,postgres,redis adds the embedded engine (torch for CPUs, 1 GB).
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN INFERRY_COMPILED=1 python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
ARG EXTRAS=postgres,redis
RUN python -m venv /opt/inferry \
    && /opt/inferry/bin/python -m pip install --no-cache-dir "$(echo /wheels/inferry-*.whl)[${EXTRAS}]" \
    && /opt/inferry/bin/python -m pip uninstall --yes pip setuptools

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/inferry /opt/inferry
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/inferry inferry
ENV PATH=/opt/inferry/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /var/lib/inferry
VOLUME /var/lib/inferry
EXPOSE 8000 8100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["inferry"]
CMD ["serve", "--config", "/etc/inferry/inferry.yaml", "--host", "0.0.0.0", "--port", "8000"]
