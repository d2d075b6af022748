"""What everything stands on: tensor specs, the checkpoint protocols, plans, errors and printable text."""
