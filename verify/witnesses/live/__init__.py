"""A live engine: its answers, and its weights after updates. Engines are adapters."""
