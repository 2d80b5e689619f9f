"""Patterns given as ordinary PyTorch functions: traced, matched as subgraphs, and verified before they are registered."""
