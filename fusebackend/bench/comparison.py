"""What changed from one run to another."""

from __future__ import annotations

from typing import Any

from fusebackend.bench.rows import SECTIONS, complete, identity, ratios

#: Ratios that changed by no more than this part are not listed.
NOTICED = 0.03


def changes(new: dict[str, Any], old: dict[str, Any]) -> str:
    """Lines that list the ratios that changed by more than ``NOTICED``, and the rows that only one of the runs has."""
    lines = []
    for key in ("device", "torch"):
        if new["environment"].get(key) != old["environment"].get(key):
            lines.append(f"not the same {key}: {old['environment'].get(key)} before, {new['environment'].get(key)} now")
    compared = 0
    for section in SECTIONS:
        rows, before = ({identity(section, r): r for r in run.get(section, []) if complete(r)} for run in (new, old))
        for names in [names for names in before if names not in rows and section in new]:
            lines.append(f"{' '.join(names)}: not measured now")
        for names, row in rows.items():
            if names not in before:
                if section in old:
                    lines.append(f"{' '.join(names)}: new")
                continue
            then = ratios(section, before[names])
            for what, ratio in ratios(section, row).items():
                compared += what in then
                if what in then and abs(ratio / then[what] - 1) > NOTICED:
                    lines.append(f"{' '.join(names)}: {what} {then[what]:.3f} -> {ratio:.3f} ({100 * (ratio / then[what] - 1):+.1f} %)")
    lines.append(f"{compared} ratios compared; those that changed by more than {100 * NOTICED:.0f} % are listed")
    return "\n".join(lines)
