"""The sidecar: data-plane server, HTTP process and command line."""
