"""A live engine: what it answers, and what it holds after weight updates. Knows no engine by name."""
