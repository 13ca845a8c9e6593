# One image for every program of DualMap; the command chooses which: `python -m services.router`, `dualmap replay`, …
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Byte code is made once, at the end, in a form that does not hold times: two builds give the same files.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 SOURCE_DATE_EPOCH=315532800
WORKDIR /build
RUN python -m venv --without-pip /opt/dualmap
COPY requirements.lock ./
# Wheels only, so that no compiler is ever needed. The simulator's charts are drawn on a desk: their libraries stay out.
RUN python -m pip --python /opt/dualmap/bin/python install --quiet --only-binary :all: --require-hashes -r requirements.lock \
 && python -m pip --python /opt/dualmap/bin/python uninstall --quiet --yes \
        matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil \
 && find /opt/dualmap/lib -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
COPY dualmap dualmap
COPY services services
RUN site=$(/opt/dualmap/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r dualmap services "$site" \
 && printf '#!/opt/dualmap/bin/python\nfrom dualmap.cli.__main__ import main\n\nmain()\n' >/opt/dualmap/bin/dualmap \
 && chmod 755 /opt/dualmap/bin/dualmap \
 && /opt/dualmap/bin/python -m compileall -q --invalidation-mode unchecked-hash "$site"

FROM ${BASE_IMAGE}
RUN groupadd --system --gid 10001 dualmap \
 && useradd --system --uid 10001 --gid dualmap --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin dualmap \
 && install -d -o dualmap -g dualmap /var/lib/dualmap
COPY --from=build /opt/dualmap /opt/dualmap
ENV PATH=/opt/dualmap/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER dualmap
WORKDIR /tmp
# Asks the gRPC health service at DUALMAP_SERVER__PORT: ready, not merely alive.
HEALTHCHECK --interval=5s --timeout=10s --start-period=120s --retries=4 CMD ["python", "-m", "dualmap.cli.probe"]
CMD ["dualmap", "--help"]
