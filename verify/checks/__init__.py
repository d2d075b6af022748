"""One function a check, by subject."""
