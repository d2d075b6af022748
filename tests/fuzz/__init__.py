"""Fuzzing of every parser of what others wrote: `make fuzz`. lab/security-testing.md says what it has found."""
