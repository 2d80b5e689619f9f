"""What was rewritten, what was not and why: the report of a compile, as an object, as text, as a page, and kept beside Inductor's cache."""
