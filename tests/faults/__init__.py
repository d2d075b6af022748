"""Faults that are injected into ckptkit's verbs: disks, signals, files that change, streams and limits."""
