from fusebackend.patterns.fp32_matmul import match  # noqa: F401  registers its patterns
