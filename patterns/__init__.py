"""The families that ship with fusebackend, one package each; every package here is loaded and registers its patterns."""
