"""Weight updates that slime, miles and vime publish as changed bytes, and their replay onto a full checkpoint."""
