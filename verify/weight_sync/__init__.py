"""Checks of hooks (`ckptkit.hooks`) while a job runs: weight updates of engines, and the loaded model of a rank."""
