# syntax=docker/dockerfile:1
# Both programs in an image that holds nothing else: no shell, no libc, no
# package manager. Build it with the version to stamp:
#   docker build --build-arg VERSION=v0.1.0 -t refiller:v0.1.0 .
FROM --platform=$BUILDPLATFORM golang:1.26-alpine AS build
RUN apk add --no-cache ca-certificates
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG TARGETOS TARGETARCH VERSION=devel
# The tag production leaves the embedded servers of "refiller dev" out.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -tags production -ldflags "-s -w -X github.com/tokenrefill/refiller/internal/cli.stamp=$VERSION" -o /out/ ./cmd/refiller ./cmd/consumer

FROM scratch
ARG VERSION=devel
LABEL org.opencontainers.image.title=refiller \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.source=https://github.com/tokenrefill/refiller \
      org.opencontainers.image.licenses=Apache-2.0
# Certificates for rediss:// and https:// with a public authority. Time zones are inside the programs.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/refiller /out/consumer /
USER 65532:65532
EXPOSE 9090
ENTRYPOINT ["/refiller"]
