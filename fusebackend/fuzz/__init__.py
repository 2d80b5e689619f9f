"""Differential fuzzing: random programs around the families, run eagerly and with ``backend="fuse"``, and compared.

``python -m fusebackend fuzz`` runs it. ``tensors`` describes inputs and ``programs`` programs; ``builder`` and ``steps`` write a
program line by line, and ``random_programs`` draws whole ones with hypothesis; ``execution`` runs them, ``compare`` says when a
result is wrong, and ``run`` is the loop. Families add the sites that they look for by ``CORES`` in their ``fuzz.py``.
"""
