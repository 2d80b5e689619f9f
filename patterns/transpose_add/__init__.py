from fusebackend.patterns.transpose_add import match  # noqa: F401  registers its patterns
