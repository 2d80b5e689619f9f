"""What registering a pattern raises."""

from __future__ import annotations


class RegistrationError(ValueError):
    """A pattern can't be registered. The message says what was given and what is accepted."""
