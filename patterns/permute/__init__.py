from fusebackend.patterns.permute import match  # noqa: F401  registers its patterns
