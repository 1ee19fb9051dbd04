# Arguments, so that a machine which can't pull these can name its own: see tests/image/run.
ARG RUST_IMAGE=rust:1.95-bookworm
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${RUST_IMAGE} AS build
WORKDIR /build
# The image is pulled more often than a backtrace is read.
ENV CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=symbols

# The dependencies first, against an empty program: this layer stays while only Tollgate's own code changes.
COPY Cargo.toml Cargo.lock ./
RUN mkdir src && touch src/lib.rs && echo 'fn main() {}' >src/main.rs && cargo build --locked --release && rm -r src

# Cargo takes a file that is older than its last build for built, and COPY keeps the files' times.
COPY src src
RUN touch src/lib.rs src/main.rs && cargo build --locked --release

# The final image has no shell to make a folder with.
RUN mkdir -p /certs

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Tollgate" \
    org.opencontainers.image.description="A TLS reverse proxy for LLM APIs: API keys, exact limits, streaming" \
    org.opencontainers.image.licenses="MIT OR Apache-2.0"

COPY --from=build /build/target/release/tollgate /usr/local/bin/tollgate
COPY proxy.toml /etc/tollgate/proxy.toml
# A named volume that is mounted here takes this owner over, so a development certificate can be made in it.
COPY --from=build --chown=65532:65532 /certs /etc/tollgate/certs

ENV TOLLGATE_CONFIG=/etc/tollgate/proxy.toml
USER 65532:65532
EXPOSE 8443
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["/usr/local/bin/tollgate", "health"]
ENTRYPOINT ["/usr/local/bin/tollgate"]
