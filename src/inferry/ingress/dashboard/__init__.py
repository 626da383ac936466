"""The dashboard at `/`: its files, its data, and the sessions of browsers."""
