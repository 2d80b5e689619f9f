"""Whether a substitution pays: kept verdicts, timings of regions and of whole graphs."""
