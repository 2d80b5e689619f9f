"""``python -m fusebackend bench``: measures this package's kernels beside their peers, in one run.

``kernels`` times the cases that each family declares in its ``bench.py``. ``models`` times a step of public models or of a
user's model, ``compile`` the time of a compile, and ``losses`` compares how training proceeds with and without substitutions.
``table`` and ``plot`` read the JSON that these commands write. README.md in this folder says how each figure is taken.
"""

from fusebackend.bench.case import Case

__all__ = ["Case"]
