"""How the tensors of one rule become one another, and which shapes that gives."""
