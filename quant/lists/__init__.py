"""Lists of unquantized modules in formats other than compressed-tensors': who reads which key, and how."""
