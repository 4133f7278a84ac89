"""The steps of a script that are watched, with the instruments of each."""
