"""Differential fuzzing: random programs around the families, run eagerly and with ``backend="fuse"``, and compared.

``python -m fusebackend fuzz`` runs it; ``tensors`` says what inputs look like, ``programs`` what a program is, ``build``
and ``families`` how random ones are made (with hypothesis), ``compare`` when a result is wrong, ``run`` is the loop.
"""
