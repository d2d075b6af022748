"""Checks of hooks while a job runs: weight updates of engines, and the loaded model of a rank.

Only `ckptkit.app.hooks` and `ckptkit.hooks` import it.
"""
