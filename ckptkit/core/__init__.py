"""The foundation of all packages: tensor specs, checkpoint protocols, plans, errors and printable text."""
