"""What the parameters of a layer must hold after an engine repacked them for a kernel, computed from what was loaded.

Knows no engine: an adapter says which layout its step after loading makes of a layer. A layout that is known is
compared bit for bit. A kernel that is run on unit vectors (`values.products`) needs none and shows less: it rounds, so
that a scale off by a bit cannot be told, and of experts it gives sums over both of their matrices.
"""
