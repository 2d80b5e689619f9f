"""Matching patterns in FX graphs and applying them, each replacement checked before it is committed."""
