"""Why something is not timed."""


class Unfit(Exception):
    """A region or graph that can't be timed; the message says why."""
