"""The native library: built with ninja, kept in a private cache, loaded once; and the operators that it implements. See README.md."""
