"""Fuzzing of every parser of what others wrote: `make fuzz`. docs/security-testing.md says what it has found."""
