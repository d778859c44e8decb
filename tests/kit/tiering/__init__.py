"""The tiering alone: an oracle of what every medium holds, short sentences on it, and accounts of its own."""
