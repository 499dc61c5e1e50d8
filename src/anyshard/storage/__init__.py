"""Storage: where bytes go. The `Store` protocol, one file per backend, wrappers, and the way from a URL to a store."""
