"""What a trainer's own argument parsing makes of a launch."""
