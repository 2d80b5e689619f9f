"""``python -m fusebackend bench``: every peer and ours, measured in one run.

``kernels`` times the cases that the families bring along (``bench_cases`` in their files), ``models`` steps of public models
or of a user's own, ``compile`` what the backend adds to the time of a compile; ``table`` and ``plot`` read their JSON.
"""

from fusebackend.bench.case import Case

__all__ = ["Case"]
