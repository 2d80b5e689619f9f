"""What was rewritten, what was not and why; kept beside Inductor's cached code."""
