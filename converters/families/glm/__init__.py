"""GLM-4 to GLM-5."""
