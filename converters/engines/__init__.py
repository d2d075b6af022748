"""What the engines' own registries have, a file each, which `lab/option_names.py` writes from an installed release."""
