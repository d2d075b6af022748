"""All checks, one function each, by subject."""
