"""What the command line offers around a compile."""
