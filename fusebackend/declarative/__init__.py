"""Patterns that are given as ordinary PyTorch: traced, found as subgraphs, verified before they are registered."""
