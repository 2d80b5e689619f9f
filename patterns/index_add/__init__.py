from fusebackend.patterns.index_add import match  # noqa: F401  registers its patterns
