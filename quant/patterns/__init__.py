"""Regular expressions that a checkpoint or a command line brings: Python's own verdict, in bounded time."""
