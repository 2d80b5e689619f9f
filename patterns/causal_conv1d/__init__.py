from fusebackend.patterns.causal_conv1d import match  # noqa: F401  registers its patterns
