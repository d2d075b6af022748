"""What the parameters of a layer must hold after an engine repacked them for a kernel, computed from what was loaded.

Knows no engine: an adapter says which layout its step after loading makes of a layer.
"""
