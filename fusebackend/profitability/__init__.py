"""Whether a substitution pays: kept measurements, estimates, timings of regions and of whole graphs."""
