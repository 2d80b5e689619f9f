"""Differential fuzzing: random programs around the families, run eagerly and with ``backend="fuse"``, and compared.

``python -m fusebackend fuzz`` runs it; ``tensors`` says what inputs look like, ``programs`` what a program is, ``build``
and ``families`` how random ones are made (with hypothesis), ``compare`` when a result is wrong, ``run`` is the loop.
"""

import os

# oneDNN's newer code generator for depthwise convolutions in 16 bits may never end, by what lies in memory (torch 2.13), with nothing of
# ours called, and a loop in C++ can't be interrupted. This keeps to the older one; it is read when torch first calls oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
