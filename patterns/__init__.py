"""The families that ship with fusebackend, one file each; every module here is loaded and registers its patterns."""
