"""What hooks look at while a job runs: weight updates of engines, and the model that a rank has loaded.

Only `ckptkit.app.hooks` and `ckptkit.hooks` import it.
"""
