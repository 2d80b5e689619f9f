"""Tools around a compile: explain, bisect, the demo, compute-sanitizer runs."""
