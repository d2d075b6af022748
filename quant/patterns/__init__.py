"""Regular expressions from a checkpoint or a command line: matched by Python, refused where they could run for long."""
